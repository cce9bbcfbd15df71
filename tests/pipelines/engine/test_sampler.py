"""The sampler: each rule compared with its definition, and the whole with the exact distribution."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import NoBadWordsLogitsProcessor, NoRepeatNGramLogitsProcessor

from conf.decoding import DecodeConfig
from kernels.sampling.reference import invert, keep_min_p, keep_top_k, keep_top_p
from pipelines.engine.logits import process_logits
from pipelines.engine.request import ContextLimit, SamplingContext
from pipelines.engine.request_factory import resolve_sampling_params
from pipelines.engine.sampler import sample, token_logprobs, uniform
from tests.helpers.cases import each

INF = math.inf


def context(
    prompt: list[int], output: list[int], eos: frozenset[int] = frozenset(), **decode: object
) -> SamplingContext:
    bad_words = decode.pop("bad_words", ())
    config = DecodeConfig(**{"max_new_tokens": 50, **decode}).resolved({})  # type: ignore[arg-type]
    params = resolve_sampling_params(config, len(prompt), ContextLimit(1000, "limit"), eos, bad_words)  # type: ignore[arg-type]
    return SamplingContext(params, prompt + output, len(prompt))


def processed(logits: torch.Tensor, of: SamplingContext) -> torch.Tensor:
    """Return one processed row [V]."""
    return process_logits(logits[None], [of])[0]


def kept(logits: torch.Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero()[:, 0].tolist() for row in logits]


def log(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def test_top_k_keeps_the_k_largest_and_their_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0], [1.0, 3.0, 2.0, 0.0], [4.0, 3.0, 2.0, 1.0], [4.0, 3.0, 2.0, 1.0]])
    assert kept(keep_top_k(logits, torch.tensor([[2], [1], [0], [9]]))) == [[1, 2, 3], [1], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_top_p_keeps_the_token_that_crosses_the_threshold() -> None:
    assert kept(keep_top_p(log(0.5, 0.45, 0.05), torch.tensor([[0.9]]))) == [[0, 1]]
    assert kept(keep_top_p(log(0.05, 0.5, 0.45), torch.tensor([[0.4]]))) == [[1]]
    assert kept(keep_top_p(log(0.25, 0.25, 0.25, 0.25), torch.tensor([[0.6]]))) == [[0, 1, 2]]
    assert kept(keep_top_p(log(0.2, 0.3, 0.5), torch.tensor([[1.0]]))) == [[0, 1, 2]]


def test_min_p_is_a_share_of_the_most_likely() -> None:
    assert kept(keep_min_p(log(0.6, 0.3, 0.07, 0.03), torch.tensor([[0.1]]))) == [[0, 1, 2]]


def test_repetition_penalty_divides_positive_and_multiplies_negative() -> None:
    logits = torch.tensor([2.0, -2.0, 4.0, -4.0])
    assert processed(logits, context([0, 1, 0], [3], repetition_penalty=2.0)).tolist() == [1.0, -4.0, 4.0, -8.0]
    assert logits.tolist() == [2.0, -2.0, 4.0, -4.0]


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    row = processed(torch.zeros(4), context([0, 0, 1], [1, 2, 2, 2], presence_penalty=0.5, frequency_penalty=0.25))
    assert row.tolist() == [0.0, -0.75, -1.25, 0.0]


def test_min_new_tokens_forbids_eos_and_stop_tokens() -> None:
    eos = frozenset([1])
    assert processed(torch.zeros(4), context([0], [2], eos, min_new_tokens=2, stop_token_ids=[3])).tolist() == [
        0.0,
        -INF,
        0.0,
        -INF,
    ]
    assert sample(torch.tensor([[0.0, 9.0, 1.0]]), [context([0], [2, 2], eos, min_new_tokens=2)]) == [1]


TOKENS = [3, 5, 7, 5, 3, 5, 7, 2, 3, 5]  # prompt and output


@each("size", [1, 2, 3, 4, 20])
def test_no_repeat_ngram_equals_transformers(size: int) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1))
    expected = NoRepeatNGramLogitsProcessor(size)(torch.tensor([TOKENS]), logits[None].clone())[0]
    assert processed(logits, context(TOKENS[:6], TOKENS[6:], no_repeat_ngram_size=size)).equal(expected)


def test_bad_words_equal_transformers() -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1))
    words = ((9,), (5, 7), (3, 5, 8), (7, 5, 4), (2, 3, 5, 7))
    processor = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=11)
    expected = processor(torch.tensor([TOKENS]), logits[None].clone())[0]
    assert processed(logits, context(TOKENS[:6], TOKENS[6:], bad_words=words)).equal(expected)
    assert kept(expected[None]) == [[0, 1, 2, 3, 4, 5, 6, 10, 11]]


def test_bias_and_allowed_tokens() -> None:
    logits = torch.arange(5.0)
    assert processed(logits, context([0], [], logit_bias={1: 10.0, 3: -2.5})).tolist() == [0, 11, 2, 0.5, 4]
    assert processed(logits, context([0], [], allowed_token_ids=[3, 1])).tolist() == [-INF, 1, -INF, 3, -INF]


def test_a_last_token_that_only_the_device_knows() -> None:
    """Bit for bit as if it were listed: a token that is new, in the prompt, or generated before, next to rows without
    processing."""
    settings: list[dict[str, object]] = [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.7, "frequency_penalty": 0.3},
        {},
        {"repetition_penalty": 0.9, "frequency_penalty": -0.4, "logit_bias": {2: 1.5}, "allowed_token_ids": [2, 3, 5]},
        {"min_new_tokens": 4, "stop_token_ids": [3]},
        {"bad_words": ((4,),)},
    ]
    logits = torch.randn(len(settings), 9, generator=torch.Generator().manual_seed(4))
    for last in range(9):
        known = [context([2, 5, 2], [3, 3, 7, last], **options) for options in settings]
        listed = [context([2, 5, 2], [3, 3, 7], **options) for options in settings]
        result = process_logits(logits, listed, torch.full((len(settings),), last))
        assert result.equal(process_logits(logits, known))
        assert not result[[0, 1, 3, 5]].eq(logits[[0, 1, 3, 5]]).all(1).any()
        assert result[2].equal(logits[2])
    for nothing in {}, {"min_new_tokens": 4, "ignore_eos": True}:  # as a bench does, for each token
        assert process_logits(logits, [context([2], [3], frozenset({1}), **nothing)] * len(logits)) is logits


def test_narrow_logits_are_processed_in_float32() -> None:
    logits = torch.tensor([[1.0, 3.0]], dtype=torch.bfloat16)
    result = process_logits(logits, [context([1], [1], repetition_penalty=1.1)])
    assert result.tolist() == [[1.0, (torch.tensor(3.0) / 1.1).item()]]


def test_if_every_token_is_banned_there_is_none() -> None:
    rows = [
        context([0], [], allowed_token_ids=[1], bad_words=((1,),), temperature=temperature)
        for temperature in (0.0, 1.0)
    ]
    assert sample(torch.zeros(3, 4), [*rows, context([0], [])]) == [None, None, 0]


def test_order_is_penalties_temperature_top_k_top_p_min_p() -> None:
    # After the penalty token 0 is no longer first; at temperature 2 top_p needs two tokens, at temperature 1 one
    # suffices.
    row = torch.tensor([[5.0, 4.9, 3.0, -9.0]])
    settings = {"temperature": 2.0, "top_p": 0.6, "presence_penalty": 2.0}
    drawn = {sample(row, [context([3], [0], seed=seed, **settings)])[0] for seed in range(200)}
    assert drawn == {1, 0}
    settings["temperature"] = 1.0
    assert {sample(row, [context([3], [0], seed=seed, **settings)])[0] for seed in range(200)} == {1}


def test_greedy_takes_the_lowest_of_equals_whatever_the_seed() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0], [3.0, 2.0, 2.0]])
    rows = [context([0], []), context([0], [], seed=3)]
    assert sample(logits, rows) == [1, 0]


def test_callers_logits_stay_unmodified() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0]])
    sample(logits, [context([1], [2], repetition_penalty=1.5, temperature=0.5, seed=1)])
    assert logits.tolist() == [[1.0, 2.0, 2.0]]


@pytest.mark.long
@each(
    "settings",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_chi_square_against_the_exact_distribution(settings: dict[str, float]) -> None:
    vocab_size, draws = 24, 20_000
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(5)) * 2
    exact = exact_distribution(logits.tolist(), **settings)
    row = context([0], [], **{"temperature": 1.0, **settings})
    rows = [replace(row, params=replace(row.params, seed=seed)) for seed in range(draws)]
    counts = torch.bincount(torch.tensor(sample(logits.expand(draws, -1), rows)), minlength=vocab_size).tolist()
    assert all(count == 0 for count, p in zip(counts, exact, strict=True) if p == 0)
    statistic = sum((count - draws * p) ** 2 / (draws * p) for count, p in zip(counts, exact, strict=True) if p > 0)
    freedom = sum(p > 0 for p in exact) - 1
    p_value = torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(statistic / 2)).item()
    assert p_value > 1e-3  # the seeds are fixed, so this cannot fail by chance; a wrong distribution gives about 0


def exact_distribution(
    logits: list[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[float]:
    """Compute by the definitions, in plain Python."""
    weights = {i: math.exp(x / temperature) for i, x in enumerate(logits)}
    order = sorted(weights, key=lambda i: -weights[i])[: top_k or None]
    total, before, keep = sum(weights[i] for i in order), 0.0, []
    for i in order:
        if before < top_p * total:
            keep.append(i)
        before += weights[i]
    keep = [i for i in keep if weights[i] >= min_p * weights[keep[0]]]
    total = sum(weights[i] for i in keep)
    return [weights[i] / total if i in keep else 0.0 for i in range(len(logits))]


def test_draw_inverts_the_distribution_function() -> None:
    logits = log(0.25, 0.0, 0.5, 0.25).expand(5, -1)
    uniforms = torch.tensor([0.0, 0.2499, 0.2501, 0.7501, 1 - 2**-52], dtype=torch.float64)
    assert invert(logits, uniforms).tolist() == [0, 0, 2, 3, 3]


def test_uniform_is_the_published_splitmix64_stream() -> None:
    # First outputs of SplitMix64 from state 1234567 (the reference C code's well-known vector); our state is the mixed
    # seed.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    seed = unmix(1234567)
    assert [uniform(seed, step) for step in range(3)] == [(value >> 12) / 2**52 for value in expected]


def unmix(x: int) -> int:
    """Invert the mixing function, so that a seed can produce a known state."""
    mask = 2**64 - 1
    x = x ^ (x >> 31) ^ (x >> 62)
    x = x * pow(0x94D049BB133111EB, -1, 2**64) & mask
    x = x ^ (x >> 27) ^ (x >> 54)
    x = x * pow(0xBF58476D1CE4E5B9, -1, 2**64) & mask
    return x ^ (x >> 30) ^ (x >> 60)


def test_logprobs_hold_the_chosen_token_and_the_most_likely() -> None:
    logits = log(0.1, 0.2, 0.3, 0.4)[0]
    (result,) = token_logprobs(logits[None] + 7, [0], 2)
    assert result.ranks == {3: 1, 2: 2, 0: 4}
    assert {token: round(math.exp(value), 4) for token, value in result.logprobs.items()} == {3: 0.4, 2: 0.3, 0: 0.1}
    assert [step.ranks for step in token_logprobs(logits.expand(2, -1), [3, 1], 0)] == [{3: 1}, {1: 3}]
