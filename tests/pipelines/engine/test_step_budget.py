"""Steps with generating sequences stay within the limit, on machines of any speed."""

from pipelines.engine.step_budget import MIN_PROMPT_TOKENS, StepBudget
from tests.helpers.cases import each


@each("token_ms", [0.05, 0.7, 3.1])
@each("base_ms", [0.4, 35.0])
def test_the_time_of_steps_approaches_the_limit_from_below(token_ms: float, base_ms: float) -> None:
    budget, num_generating = StepBudget(200.0), 7
    for _ in range(10):
        budget.observe(0, base_ms)
    for _ in range(20):
        num_prompt_tokens = budget.max_tokens(num_generating) - num_generating
        step_ms = base_ms + num_prompt_tokens * token_ms
        assert step_ms <= 200.0 + 1e-6
        budget.observe(num_prompt_tokens, step_ms)
    assert step_ms > 200.0 - 2 * token_ms


def test_tokens_that_take_longer_behind_others_are_followed() -> None:
    budget, place, longest_ms = StepBudget(100.0), 0, 0.0
    budget.observe(0, 10.0)
    while place < 20_000:
        num_tokens = budget.max_tokens(1) - 1
        step_ms = 10.0 + num_tokens * (0.1 + place / 20_000)  # eleven times as long at the end
        budget.observe(num_tokens, step_ms)
        place, longest_ms = place + num_tokens, max(longest_ms, step_ms)
    assert longest_ms <= 150.0  # by as much as tokens become slower from one step to the next


def test_a_slow_machine_continues() -> None:
    budget = StepBudget(1.0)
    budget.observe(0, 50.0)
    budget.observe(100, 500.0)
    assert budget.max_tokens(3) == 3 + MIN_PROMPT_TOKENS


def test_the_first_prompt_begins_small() -> None:
    assert StepBudget(200.0).max_tokens(5) == 5 + MIN_PROMPT_TOKENS
