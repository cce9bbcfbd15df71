"""Token budget of a step, so that prompts do not delay generating sequences."""

MIN_PROMPT_TOKENS = 16  # minimum per step, so that prompts progress on any machine
WEIGHT = 0.3  # weight of the newest measurement in the moving average


class StepBudget:
    """Measures the time of a prompt token and of a step without prompts, and bounds a step's prompt tokens."""

    def __init__(self, max_step_ms: float) -> None:
        self._max_step_ms = max_step_ms
        self._base_ms = 0.0  # of a step without prompt tokens
        self._token_ms: float | None = None  # None: not measured yet

    def max_tokens(self, num_generating: int) -> int:
        """Return the budget of a step with prompts and `num_generating` sequences, which get one token each."""
        if self._token_ms is None:
            return num_generating + MIN_PROMPT_TOKENS
        fitting = int((self._max_step_ms - self._base_ms) / self._token_ms)
        return num_generating + max(MIN_PROMPT_TOKENS, fitting)

    def observe(self, num_prompt_tokens: int, step_ms: float) -> None:
        """Record the time of a step with `num_prompt_tokens` prompt tokens."""
        if num_prompt_tokens == 0:
            self._base_ms += WEIGHT * (step_ms - self._base_ms) if self._base_ms else step_ms
        elif num_prompt_tokens >= MIN_PROMPT_TOKENS:  # with fewer tokens the step's fixed time dominates
            token_ms = max(step_ms - self._base_ms, 1e-3) / num_prompt_tokens
            known = token_ms if self._token_ms is None else self._token_ms
            # A longer time counts at once, because a token takes longer the more tokens of its prompt are before it.
            self._token_ms = max(token_ms, known + WEIGHT * (token_ms - known))
