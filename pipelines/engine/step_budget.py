"""How many tokens a step may have, so that the prompts in it do not make those who generate wait."""

LEAST_PROMPT_TOKENS = 16  # of a step: prompts go on, however slow the machine is
WEIGHT = 0.3  # of the newest measurement in the mean


class StepBudget:
    """Learns what a prompt's token and a step without any take, and bounds the prompt tokens beside those who generate."""

    def __init__(self, max_step_ms: float) -> None:
        self._max_step_ms = max_step_ms
        self._base_ms = 0.0  # of a step in which nobody has a prompt
        self._token_ms: float | None = None  # None: no prompt was computed yet

    def max_tokens(self, num_generating: int) -> int:
        """Return the budget of a step that has prompts beside `num_generating` sequences, each of which gets a token."""
        if self._token_ms is None:
            return num_generating + LEAST_PROMPT_TOKENS
        fitting = int((self._max_step_ms - self._base_ms) / self._token_ms)
        return num_generating + max(LEAST_PROMPT_TOKENS, fitting)

    def observe(self, num_prompt_tokens: int, step_ms: float) -> None:
        """Take the time of a step that had so many tokens of prompts."""
        if num_prompt_tokens == 0:
            self._base_ms += WEIGHT * (step_ms - self._base_ms) if self._base_ms else step_ms
        elif num_prompt_tokens >= LEAST_PROMPT_TOKENS:  # the time of fewer is mostly the step's own
            token_ms = max(step_ms - self._base_ms, 1e-3) / num_prompt_tokens
            known = token_ms if self._token_ms is None else self._token_ms
            # A longer time counts at once: tokens take longer the more of their prompt is before them.
            self._token_ms = max(token_ms, known + WEIGHT * (token_ms - known))
