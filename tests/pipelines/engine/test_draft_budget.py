"""The number of drafts of a row, with a simulated clock: step costs are formulas, and nothing waits."""

import random
from collections.abc import Callable
from pathlib import Path

from conf.decoding import DecodeConfig
from conf.speculation import Acceptance, DraftOrder, Speculate, SpeculationConfig
from models.batch import Batch
from pipelines.engine.draft_budget import (
    LENGTHS,
    MIN_TIMES,
    PROBE_EVERY,
    AcceptanceRate,
    DraftBudget,
    StepCosts,
    draft_lengths,
)
from pipelines.engine.request import Sequence
from pipelines.engine.speculation import Speculator
from tests.helpers.builders import engine_of
from tests.helpers.cases import each
from tests.helpers.drafts import Hostile
from tests.helpers.scheduling import factory_of

FACTORY = factory_of()


def rows_of(count: int, **speculation: object) -> list[Sequence]:
    settings = SpeculationConfig(**speculation)  # type: ignore[arg-type]
    decode = DecodeConfig(max_new_tokens=1000, speculate=Speculate.ngram, speculation=settings)
    return [Sequence.begin(FACTORY.make(i, [1, 2, 3], decode)) for i in range(count)]


def costs_of(seconds: dict[int, float]) -> StepCosts:
    costs = StepCosts()
    for size, took in seconds.items():
        for _ in range(MIN_TIMES):
            costs.took(size, took)
    return costs


def test_a_size_takes_its_least_time_after_its_first_ones() -> None:
    costs = StepCosts()
    for took in (9.0, 5.0):
        costs.took(4, took)
        assert costs.seconds(4) == float("inf")
    costs.took(4, 2.0)
    assert costs.seconds(4) == 2.0
    for _ in range(8):
        costs.took(4, 3.0)
    assert costs.seconds(4) == 3.0  # the old times are forgotten


def test_sizes_between_are_on_the_line_and_larger_ones_take_as_long_while_weights_are_read_once() -> None:
    costs = costs_of({2: 1.0, 6: 3.0})
    assert [costs.seconds(n) for n in (1, 2, 3, 5, 6, 7, 16, 17)] == [1.0, 1.0, 1.5, 2.5, 3.0, 3.0, 3.0, float("inf")]


def test_sizes_beyond_one_reading_of_the_weights_grow_as_they_did_last() -> None:
    costs = costs_of({16: 1.0, 24: 3.0})
    assert [costs.seconds(n) for n in (20, 25, 36, 37)] == [2.0, 3.25, 6.0, float("inf")]
    assert costs_of({24: 2.0}).seconds(36) == 2.0
    assert costs_of({24: 2.0, 32: 1.0}).seconds(40) == 1.0  # a time that decreases with size was an outlier


def test_the_share_is_the_mean_of_a_beta_distribution_over_drafts_that_were_tried() -> None:
    share = AcceptanceRate()
    assert share.chance(0.25) == 0.25
    share.add(2, 5)  # the third was rejected; the fourth and fifth carry no information
    share.add(3, 3)
    assert share.chance(0.25) == (5 + 2 * 0.25) / (6 + 2)


@each(
    "chances, seconds, expected",
    [
        ([0.8], {1: 1.0, 16: 1.0}, [15]),  # further tokens are free
        ([0.8], {1: 1.0, 16: 16.0}, [0]),  # each token costs the same
        ([0.9, 0.1], {2: 1.0, 4: 1.1, 32: 15.0}, [2, 0]),  # only rows whose drafts pay
        ([0.0], {1: 1.0, 16: 1.0}, [0]),
        ([0.99], {}, [0]),  # before the cost is known
    ],
)
def test_lengths_give_the_most_tokens_per_second(
    chances: list[float], seconds: dict[int, float], expected: list[int]
) -> None:
    assert draft_lengths(chances, [15] * len(chances), len(chances), costs_of(seconds)) == expected


def simulate(
    rows: list[Sequence], acceptance: float, cost: Callable[[int], float], num_steps: int = 400
) -> tuple[float, int]:
    """Return tokens per second relative to plain steps, if the first two steps of a size seem slower, and the number of
    steps with drafts."""
    budget, generator, seen = DraftBudget(), random.Random(0), dict[int, int]()
    most = [row.params.speculation.num_tokens for row in rows]
    num_tokens, seconds, drafting = 0, 0.0, 0
    for _ in range(num_steps):
        lengths = budget.lengths(rows, most, len(rows))
        assert set(lengths) <= set(LENGTHS)
        size = len(rows) + sum(lengths)
        seen[size] = seen.get(size, 0) + 1
        took = cost(size)
        seconds += took
        budget.costs.took(size, 5 * took if seen[size] < MIN_TIMES else took)
        drafting += any(lengths)
        for row, length in zip(rows, lengths, strict=True):
            accepted = next((i for i in range(length) if generator.random() >= acceptance), length)
            num_tokens += 1 + accepted
            if length:
                budget.learn(row, accepted, length)
    return num_tokens / seconds / (len(rows) / cost(len(rows))), drafting


def flat(size: int) -> float:
    return 1.0 + 0.005 * size


def steep(size: int) -> float:
    return 1.0 + 0.2 * size


@each("num_rows", [1, 4, 16])
@each("cost", [flat, steep])
def test_drafts_that_do_not_pay_are_rare(num_rows: int, cost: Callable[[int], float]) -> None:
    speed, drafting = simulate(rows_of(num_rows), 0.0, cost)
    assert speed > 0.97
    assert drafting < 400 / PROBE_EVERY + 40


def test_steep_costs_keep_sixteen_rows_from_drafting_what_is_half_right() -> None:
    assert simulate(rows_of(16), 0.5, steep)[0] > 0.97


def test_drafts_that_pay_reach_the_expected_speed() -> None:
    most = sum(0.8**i for i in range(8))  # tokens of a step with seven drafts
    speed, _ = simulate(rows_of(1), 0.8, flat)
    assert 0.85 * most * flat(1) / flat(8) < speed <= 1.05 * most * flat(1) / flat(8)
    assert simulate(rows_of(16), 0.8, flat)[0] > 1.8


def test_fixed_lengths_know_no_price() -> None:
    budget, rows = DraftBudget(), rows_of(2, adaptive=False, num_tokens=6)
    for _ in range(5):
        assert budget.lengths(rows, [6, 0], 2) == [6, 0]
        budget.learn(rows[0], 0, 6)
    lossy = rows_of(1, acceptance=Acceptance.top_p_window, num_tokens=6)
    assert DraftBudget().lengths(lossy, [6], 1) == [6]


def test_paddles_lengths_grow_by_two_and_shrink_by_one() -> None:
    """PaddleNLP's speculate_update.cu: if all drafts are accepted +2 up to the maximum, else -1 down to 1."""
    budget, (row,) = DraftBudget(), rows_of(1, order=DraftOrder.paddle, num_tokens=5)
    got = []
    for accepted_all in (True, False, False, False, False, False, True, True, True):
        (length,) = budget.lengths([row], [5], 1)
        got.append(length)
        budget.learn(row, length if accepted_all else length - 1, length)
    assert got == [5, 5, 4, 3, 2, 1, 1, 3, 5]
    budget.learn(row, 2, 2)  # all available tokens were copied, fewer than the limit
    assert budget.lengths([row], [5], 1) == [4]


def test_a_row_whose_drafts_are_wrong_is_asked_for_few(chatty: Path) -> None:
    """The engine reports step times and accepted drafts to the budget. Proposers are not called for rows without
    drafts."""
    engine, now, calls = engine_of(chatty, tokenizer=""), [0.0], []
    engine.speculator = Speculator(engine.scheduler, lambda: now[0])
    execute = engine.executor.execute

    def timed(batch: Batch, *arguments: object) -> object:
        now[0] += steep(batch.shape.num_tokens)
        return execute(batch, *arguments)  # type: ignore[arg-type]

    engine.executor.execute = timed  # type: ignore[method-assign, assignment]

    class Counted(Hostile):
        def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
            calls.append(len(wanted))
            return super().propose(wanted)

    decode = DecodeConfig(max_new_tokens=100, ignore_eos=True)
    (plain,) = engine.generate([engine.request(0, [0, 70], decode)])
    known = {(0, 0): plain.completions[0].token_ids}
    proposer = Counted(known, lambda place: False)
    engine.speculator.proposers[Speculate.ngram] = proposer
    drafted = DecodeConfig(max_new_tokens=100, ignore_eos=True, speculate=Speculate.ngram)
    (output,) = engine.generate([engine.request(0, [0, 70], drafted)])
    assert output.completions == plain.completions
    assert 0 < len(calls) < 20
