"""DRY, top-n-sigma, typical_p, XTC and dynamic temperature: each compared with its definition, computed token by token."""

import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import TypicalLogitsWarper

from conf.decoding import DecodeConfig
from conf.speculation import Speculate
from pipelines.engine.dry import find_breakers, penalties
from pipelines.engine.logits import process_logits
from pipelines.engine.request import ContextLimit, SamplingContext
from pipelines.engine.request_factory import resolve_sampling_params
from pipelines.engine.sampler import sample
from tests.helpers.builders import complete, engine_of
from tests.helpers.catalog import write_other


def context(seed: int = 0, **decode: object) -> SamplingContext:
    config = DecodeConfig(**{"max_new_tokens": 50, "seed": seed, **decode}).resolved({})  # type: ignore[arg-type]
    params = resolve_sampling_params(config, 2, ContextLimit(1000, "limit"), frozenset())
    return SamplingContext(params, [1, 2], 2)


def drawn(logits: torch.Tensor, **decode: object) -> Counter[int]:
    """Return the tokens of 400 seeds."""
    contexts = [context(seed, **decode) for seed in range(400)]
    tokens = sample(logits.expand(400, -1), contexts)
    assert tokens[:3] == [sample(logits[None], [one])[0] for one in contexts[:3]]  # alone
    return Counter(token for token in tokens if token is not None)


def kept(logits: torch.Tensor, **decode: object) -> set[int]:
    """Return the tokens that 400 draws gave. The least likely token of the tests has a probability of 0.02 or more."""
    return set(drawn(logits, **{"temperature": 1.0, **decode}))


LOGITS = torch.tensor([2.0, 1.9, 0.4, 1.2, -torch.inf, 0.3, 2.2, -0.5])


def test_truncations_keep_what_their_definitions_keep() -> None:
    finite = [value for value in LOGITS.tolist() if value > -math.inf]
    mean = sum(finite) / len(finite)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in finite) / len(finite))
    for n in (0.3, 1.0, 2.0):
        expected = {i for i, value in enumerate(LOGITS.tolist()) if value >= max(finite) - n * deviation}
        assert kept(LOGITS, top_n_sigma=n) == expected
    assert kept(LOGITS, top_n_sigma=-1) == kept(LOGITS) == set(range(8)) - {4}
    for p in (0.1, 0.5, 0.9):
        warped = TypicalLogitsWarper(p)(torch.tensor([[1, 2]]), LOGITS[None])[0]
        assert kept(LOGITS, typical_p=p) == set(warped.isfinite().nonzero()[:, 0].tolist())
    # XTC drops the likely tokens but one at its probability
    probabilities = torch.tensor([0.3, 0.25, 0.2, 0.15, 0.06, 0.04])
    logits = probabilities.log()
    assert kept(logits, xtc_probability=1.0, xtc_threshold=0.18) == {2, 3, 4, 5}
    assert kept(logits, xtc_probability=1.0, xtc_threshold=0.28) == set(range(6))  # one token is likely: it stays
    assert kept(logits, xtc_probability=1.0, xtc_threshold=0.51) == set(range(6))
    # after top_p=0.7 the first three tokens have 0.4, 0.33 and 0.27
    assert kept(logits, xtc_probability=1.0, xtc_threshold=0.3, top_p=0.7) == {1, 2}
    half = drawn(logits, temperature=1.0, xtc_probability=0.5, xtc_threshold=0.18)
    # 400 draws of probability 0.5 * 0.3: 60, with a standard deviation of 7
    assert 30 < half[0] < 90


def test_dynamic_temperature_follows_the_entropy() -> None:
    """400 seeds draw the same tokens with the temperature that the formula gives."""
    logits = torch.tensor([1.0, 0.2, -torch.inf, 0.9, -1.0])
    shares = [p for p in logits.softmax(-1).tolist() if p]
    entropy = -sum(p * math.log(p) for p in shares) / math.log(len(shares))
    for temperature, width, exponent in ((1.0, 0.5, 1.0), (0.6, 0.9, 2.0)):
        low, high = max(0.0, temperature - width), temperature + width
        fixed = low + (high - low) * entropy**exponent
        settings = {"dynatemp_range": width, "dynatemp_exponent": exponent}
        assert drawn(logits, temperature=temperature, **settings) == drawn(logits, temperature=fixed)
    certain = torch.tensor([-torch.inf, 3.0, -torch.inf])
    assert drawn(certain, temperature=1.0, dynatemp_range=1.0) == {1: 400}


def test_rows_with_and_without_these_settings_share_a_step(caplog: pytest.LogCaptureFixture) -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    rows = [
        context(i, temperature=t, **more)
        for i, (t, more) in enumerate(
            [
                (0.0, {}),
                (1.0, {}),
                (1.0, {"typical_p": 0.4}),
                (0.0, {}),
                (0.7, {"top_n_sigma": 1.0}),
                (1.0, {"top_k": 3}),
            ]
        )
    ]
    assert sample(logits, rows) == [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    nothing = context(temperature=1.0, typical_p=0.4, allowed_token_ids=[1], suppress_tokens=[1])
    assert sample(logits[:1], [nothing]) == [None]
    DecodeConfig(temperature=0.0, typical_p=0.51, xtc_threshold=0.2, dry_base=1.5).resolved({})
    for name in ("typical_p=0.51", "xtc_threshold=0.2", "dry_base=1.5"):
        assert f"decode.{name} is not used" in caplog.text


def brute_penalties(ids: list[int], breakers: set[int], base: float, allowed: int) -> dict[int, float]:
    """Try each token, and each length of the repetition that it would continue."""
    result = {}
    for token in set(ids) - breakers:
        longest = 0
        for place in range(1, len(ids)):
            if ids[place] != token:
                continue
            length = 0
            while length < place and ids[place - 1 - length] == ids[len(ids) - 1 - length]:
                if ids[len(ids) - 1 - length] in breakers:
                    break
                length += 1
            longest = max(longest, length)
        if longest >= allowed:
            result[token] = base ** (longest - allowed)
    return result


def test_dry_penalises_what_would_continue_a_repetition() -> None:
    draw = random.Random(3)
    for _ in range(300):
        ids = [draw.randrange(4) for _ in range(draw.randrange(1, 30))]
        broken = {3} if draw.random() < 0.5 else set[int]()
        base, allowed = draw.choice((1.0, 1.75)), draw.choice((1, 2, 3))
        breakers = dict.fromkeys(broken, ((),))
        assert penalties(ids, breakers, 1.0, base, allowed, -1) == brute_penalties(ids, broken, base, allowed)
    ids = [5, 6, 7, 5, 6]
    assert penalties(ids, {}, 0.8, 1.75, 2, -1) == {7: 0.8}
    assert penalties(ids, {}, 0.8, 1.75, 2, 4) == {}  # the first occurrence is outside
    assert penalties(ids, {}, 0.8, 1.75, 2, 0) == {}
    assert penalties(ids, {6: ((),)}, 0.8, 1.75, 1, -1) == {}
    assert penalties([5, 6] * 3, {5: ((6,),)}, 1.0, 2.0, 1, -1) == {}  # a breaker of two tokens ends here
    assert penalties([9] * 3000, {}, 1.0, 1.75, 2, -1)[9] == pytest.approx(3.4e38, rel=0.01)  # not infinite
    logits = torch.zeros(1, 10)
    row = context(dry_multiplier=0.8, temperature=0.0)
    row.token_ids = ids
    assert process_logits(logits, [row])[0, 7] == pytest.approx(-0.8)
    assert process_logits(logits, [row])[0, :7].eq(0).all()
    # breakers are the tokens that contain or begin a text
    pieces = [b"a", b"\n", b".\n\n", b"x<", b"/s", b">", b"", b"s"]
    encode = {"/s>": [4, 5], "s>": [7, 5], ">": [5]}
    breakers = find_breakers(pieces, ("\n", "</s>"), lambda text: encode[text])
    assert breakers == {1: ((),), 2: ((),), 3: ((4, 5),)}


@pytest.mark.long
def test_drafts_change_no_token(tmp_path: Path) -> None:
    write_other(tmp_path, "gemma3", max_position_embeddings=512)
    engine, prompt = engine_of(tmp_path), [5, 6, 7, 8] * 5
    engine.requests = replace(engine.requests, tokenizer=None)
    for settings in (
        {"temperature": 0.0, "dry_multiplier": 2.0},
        {"temperature": 1.0, "seed": 4, "xtc_probability": 0.5, "xtc_threshold": 0.02, "typical_p": 0.9},
    ):
        decode = DecodeConfig(max_new_tokens=40, ignore_eos=True, **settings)
        plain = complete(engine, [prompt, prompt[:3]], decode)
        drafted = complete(engine, [prompt, prompt[:3]], replace(decode, speculate=Speculate.ngram))
        assert [row.token_ids for row in plain] == [row.token_ids for row in drafted]
