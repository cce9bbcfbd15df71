"""An equivalent model with outlier activations: one scale per layer fails on it, and smoothing restores it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.bench.outlier_twin import write_outlier_twin
from tests.helpers.builders import SHARED, all_logits, engine_of, write_llama
from tests.helpers.quantized_models import CALIBRATED, make, quantize_run, random_rows, write_rows

PROMPT = list(range(5, 69))


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("twins")
    write_llama(folder / "plain", hidden_size=128, intermediate_size=176)
    write_outlier_twin(folder / "plain", folder / "twin")
    return folder / "plain", folder / "twin"


def test_it_computes_the_same_with_larger_activations(twins: tuple[Path, Path]) -> None:
    plain, twin = twins
    assert all_logits(engine_of(plain), PROMPT).equal(all_logits(engine_of(twin), PROMPT))  # powers of two
    before, after = (load_file(folder / "model.safetensors") for folder in twins)
    grown = {name: (after[name] / before[name]).unique().tolist() for name in before if "layernorm" in name}
    assert all(set(factors) <= {1, 32, 64} and len(factors) > 1 for factors in grown.values())


def test_a_model_that_is_not_a_llama_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no tensors named as Llama's norms are"):
        write_outlier_twin(Path(__file__).parents[1] / "goldens" / "bloom", tmp_path / "twin")


@pytest.mark.long
def test_static_scales_fall_apart_and_smoothing_recovers(twins: tuple[Path, Path], tmp_path: Path) -> None:
    plain, twin = twins
    data = write_rows(tmp_path / "rows.jsonl", random_rows(40, 16))
    exact = all_logits(engine_of(plain), PROMPT)

    def error(source: Path, scheme: str) -> float:
        run = quantize_run(source, CALIBRATED[scheme], tmp_path / f"{source.name} {scheme}", data, num_samples=24)
        return float((all_logits(make(run, tmp_path / "run"), PROMPT) - exact).norm() / exact.norm())

    unsmoothed = error(plain, "a8w8 static")
    # Channels that are 32 to 64 times larger enlarge the steps of all channels; normal channels keep 2 to 4 bits.
    assert error(twin, "a8w8 static") > 5 * unsmoothed
    # sqrt(max(x) / max(w)) removes the same scales from the twin as from the plain model, times the factors: the codes
    # are then equal.
    recovered = error(twin, "a8w8 static smoothquant")
    assert recovered == pytest.approx(error(plain, "a8w8 static smoothquant"), rel=1e-3)
    assert recovered < 1.5 * unsmoothed


BABYLLAMA = SHARED / "data" / "models" / "babyllama_tok105"


@pytest.mark.long
@pytest.mark.skipif(not BABYLLAMA.is_dir(), reason="needs the real models of ../shared")
def test_logits_of_a_real_model_recover(tmp_path: Path) -> None:
    """DECISIONS.md (Quantisation) has the perplexities."""
    write_outlier_twin(BABYLLAMA, tmp_path / "twin")
    text = (SHARED / "data" / "text" / "tiny_stories_944k.txt").read_text(encoding="utf-8")
    (tmp_path / "text.txt").write_text(text[-60_000:], encoding="utf-8")
    float_engine = engine_of(BABYLLAMA, tokenizer="")
    assert float_engine.tokenizer is not None
    ids = float_engine.tokenizer.encode(text[:2000], True)[:250]

    def nll(logits: torch.Tensor) -> float:
        return float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])))

    exact = nll(all_logits(float_engine, ids))
    rise = {}
    for scheme in ("a8w8 static", "a8w8 static smoothquant"):
        run = quantize_run(
            tmp_path / "twin", CALIBRATED[scheme], tmp_path / scheme, tmp_path / "text.txt", tokenizer="", sequence_length=250
        )  # fmt: skip
        rise[scheme] = nll(all_logits(make(run, tmp_path / "run"), ids)) - exact
    assert rise["a8w8 static"] > 0.5  # perplexity at least 1.6 times as high; DECISIONS.md (Quantisation) has 3.7
    assert rise["a8w8 static smoothquant"] < 0.02
