"""A packed model in a file: the same bits without reading the checkpoint, and the handling of files that do not
match."""

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.quantization import Activations, QuantConfig, QuantScheme
from conf.schema import DType, ModelConfig, RunConfig, Weights
from kernels import build
from models.formats.safetensors_writer import ALIGNMENT
from pipelines.engine import Engine
from pipelines.jobs.report import reset_peak_memory
from pipelines.loading.load_engine import load_engine
from pipelines.loading.model_source import resolve_model
from pipelines.loading.packed_cache import load_packed
from pipelines.loading.planning import plan_model
from tests.helpers.builders import all_logits, complete, run_config, write_llama
from tests.helpers.cases import each
from tests.helpers.catalog import GOLDENS
from tests.helpers.damage import MUTATIONS, mutated
from tests.helpers.quantized_models import CALIBRATED

NEEDS_KERNELS = pytest.mark.skipif(build.library() is None, reason="weights are packed where the C++ kernels are")
PROMPT = list(range(5, 42))
SCHEMES = {
    "none": QuantConfig(),
    "int8": QuantConfig(QuantScheme.int8),
    "int4, groups and skipped layers": QuantConfig(
        QuantScheme.int4, group_size=32, skip=["lm_head"], overrides={"*.down_proj": "int8"}
    ),
    "int4 asymmetric": QuantConfig(QuantScheme.int4, symmetric=False),
    "a8w8": QuantConfig(QuantScheme.a8w8, activations=Activations.dynamic),
    "fp8": QuantConfig(QuantScheme.fp8, activations=Activations.dynamic),
}
STORED = (
    "int4 gptq, groups on the way",
    "a8w8 static smoothquant",
    "fp8 static per tensor",
)  # order, scales, both shapes


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUINTET_OUTPUTS", str(tmp_path))
    return tmp_path / "packed"


def job(folder: Path, quant: QuantConfig | None = None, dtype: DType = DType.float32) -> RunConfig:
    run = run_config(folder)
    return replace(run, model=replace(run.model, keep_packed=True, dtype=dtype), quant=quant or QuantConfig())


def mapped(run: RunConfig) -> Engine:
    """Return an engine whose weights do not come from the checkpoint."""
    with patch("pipelines.loading.weight_loading.load_weights", side_effect=AssertionError("the checkpoint is read")):
        return load_engine(run, 3)


def assert_same_bits(run: RunConfig) -> None:
    plain = load_engine(replace(run, model=replace(run.model, keep_packed=False)), 3)
    expected = all_logits(plain, PROMPT)
    assert all_logits(load_engine(run, 3), PROMPT).equal(expected)
    again = mapped(run)
    assert all_logits(again, PROMPT).equal(expected)
    decode = DecodeConfig(max_new_tokens=5, temperature=0, ignore_eos=True, logprobs=0)
    assert complete(again, [PROMPT], decode) == complete(plain, [PROMPT], decode)  # log probabilities too
    assert again.executor.weight_bytes == plain.executor.weight_bytes
    assert again.executor.step_weight_bytes(1) == plain.executor.step_weight_bytes(1)


@each("family", ["llama_tied_bias", "gpt2", "mixtral", "gemma2", "chatglm2"])
def test_the_same_bits_of_any_family(family: str) -> None:
    """Tied heads, biases, transposed weights, unquantised routers."""
    assert_same_bits(job(GOLDENS / family))


@each("scheme", SCHEMES)
def test_the_same_bits_of_any_scheme(scheme: str) -> None:
    assert_same_bits(job(GOLDENS / "llama_tied_bias", SCHEMES[scheme]))


@each("dtype", [DType.bfloat16, DType.float16])
def test_the_same_bits_in_half_precision(dtype: DType) -> None:
    assert_same_bits(job(GOLDENS / "llama3", dtype=dtype))


@pytest.mark.long
@each("scheme", STORED)
def test_the_same_bits_of_a_calibrated_model(scheme: str, tmp_path: Path) -> None:
    write_llama(tmp_path / "source", tie_word_embeddings=False, hidden_size=64, intermediate_size=96)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f'{{"prompt_token_ids": {list(range(5 + i, 60 + i))}}}\n' for i in range(12)))
    run = job(tmp_path / "source", CALIBRATED[scheme])
    assert_same_bits(replace(run, calibrate=replace(run.calibrate, data=str(data), num_samples=4, sequence_length=20)))


@NEEDS_KERNELS
def test_without_the_kernels_plain_weights_are_kept(monkeypatch: pytest.MonkeyPatch, kept: Path) -> None:
    load_engine(job(GOLDENS / "llama3"), 3)
    monkeypatch.setattr("kernels.build.library", lambda: None)
    assert_same_bits(job(GOLDENS / "llama3"))
    assert len(list(kept.iterdir())) == 2  # a machine that has them finds its own


def test_nothing_is_kept_unasked(kept: Path) -> None:
    load_engine(run_config(GOLDENS / "llama3"), 3)
    assert not kept.exists()


def test_tensors_begin_where_cache_lines_do(kept: Path) -> None:
    load_engine(job(GOLDENS / "llama3"), 3)
    (file,) = kept.iterdir()
    with safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
    assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors.values() if tensor.nbytes % ALIGNMENT == 0)
    assert all(tensor.data_ptr() % tensor.dtype.itemsize == 0 for tensor in tensors.values())


@pytest.mark.long
def test_memory_is_that_of_the_file(tmp_path: Path) -> None:
    """100 MB of weights. Read weights are the process's own memory; mapped weights are pages of the file, shared with
    other processes."""
    write_llama(tmp_path, vocab_size=4000, hidden_size=1024, intermediate_size=2048, num_hidden_layers=2)

    def grown(load: Callable[[], Engine]) -> tuple[int, int]:
        """Return the growth of private memory and of mapped files, after a step has read every weight."""
        reset_peak_memory()  # returns the C library's freed memory, which would hide new memory
        before = resident()
        engine = load()
        all_logits(engine, PROMPT)
        after = resident()
        size = engine.executor.weight_bytes
        assert size > 90e6
        return tuple((after[kind] - before[kind]) / size for kind in ("RssAnon", "RssFile"))  # type: ignore[return-value]

    load_engine(job(tmp_path), 3)
    # 20 MB in addition to the weights: written cache blocks, the step's tensors, freed memory.
    private_bytes, of_files = grown(lambda: load_engine(run_config(tmp_path), 3))
    assert private_bytes > 0.8
    assert of_files < 0.2
    private_bytes, of_files = grown(lambda: mapped(job(tmp_path)))
    assert private_bytes < 0.2
    assert of_files > 0.8


def resident() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss")}


def test_a_changed_checkpoint_takes_its_place(tmp_path: Path, kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_llama(tmp_path / "model")
    load_engine(job(tmp_path / "model"), 3)
    (file,) = kept.iterdir()
    assert f"{file} does not exist yet; it is made now, 0 MB" in caplog.text
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(tmp_path / "model")
    caplog.clear()
    assert_same_bits(job(tmp_path / "model"))
    assert f"{file} was written for other files or settings, or by another version; it is made now" in caplog.text
    assert list(kept.iterdir()) == [file]


def test_changed_code_takes_its_place(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_engine(job(GOLDENS / "llama3"), 3)
    with patch("pipelines.loading.fingerprint.SOURCES", ("kernels",)):
        load_engine(job(GOLDENS / "llama3"), 3)
    assert "was written for other files or settings, or by another version" in caplog.text
    assert len(list(kept.iterdir())) == 1


@each("length", [0, 5, 2000, -1])
def test_a_damaged_file_is_made_again(length: int, kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    load_engine(job(GOLDENS / "llama3"), 3)
    (file,) = kept.iterdir()
    content = file.read_bytes()
    file.write_bytes(content[:length])
    assert_same_bits(job(GOLDENS / "llama3"))
    assert f"{file} is damaged" in caplog.text
    assert file.read_bytes() == content


def change(file: Path, changes: dict[str, torch.Tensor | None]) -> None:
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = {name: tensor for name, tensor in (load_file(file) | changes).items() if tensor is not None}
    save_file(tensors, file, metadata)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.norm.weight": None}, "model.norm.weight: 'weight' is missing"),
        pytest.param(
            {"model.layers.0.mlp.up_proj.tiles": None},
            "model.layers.0.mlp.up_proj: 'tiles' is missing",
            marks=NEEDS_KERNELS,
        ),
        ({"model.norm.weight": torch.ones(65)}, r"model.norm.weight: \[65\] of torch.float32, not \[64\]"),
        ({"model.norm.weight": torch.ones(64).half()}, r"\[64\] of torch.float16, not \[64\] of torch.float32"),
        pytest.param(
            {"lm_head.tiles": torch.ones(31, 64, 16, 1)},
            r"packed weights \[\d+, 64, 16, 1\] cannot be \[31, 64, 16, 1\]",
            marks=NEEDS_KERNELS,
        ),
        pytest.param(
            {"lm_head.tiles": torch.ones(3).byte()}, r"compressed weights .* cannot be \[3\]", marks=NEEDS_KERNELS
        ),
        ({"other": torch.ones(3)}, "belongs to no layer"),
        ({"model.norm.other": torch.ones(3)}, "model.norm.other belongs to no layer"),
    ],
)
def test_a_foreign_file_is_refused(changes: dict[str, torch.Tensor | None], message: str, kept: Path) -> None:
    load_engine(job(GOLDENS / "llama3"), 3)
    (file,) = kept.iterdir()
    change(file, changes)
    with pytest.raises(UserError, match=f"{file} does not hold this model: .*{message}.*; remove it"):
        load_engine(job(GOLDENS / "llama3"), 3)


def refused(run: RunConfig, kept: Path, changes: dict[str, torch.Tensor | None]) -> str:
    """Return the error for this job's file if these of its tensors differ."""
    (file,) = kept.iterdir()
    content = file.read_bytes()
    change(file, changes)
    with pytest.raises(UserError) as raised:
        load_engine(run, 3)
    file.write_bytes(content)
    text = str(raised.value)
    assert text.startswith(f"{file} does not hold this model: ")
    assert text.endswith("; remove it, and it is made again")
    return text


@each("scheme", ["none", "int8", "fp8"])
def test_a_bias_is_compared(scheme: str, kept: Path) -> None:
    for file in kept.glob("*"):  # of the scheme before
        file.unlink()
    run, name = job(GOLDENS / "llama_tied_bias", SCHEMES[scheme]), "model.layers.0.self_attn.q_proj.bias"
    load_engine(run, 3)
    for bias, change in (
        (torch.ones(65), "[65] of torch.float32"),
        (torch.ones(1), "[1] of torch.float32"),
        (torch.ones(64, 1), "[64, 1] of torch.float32"),
        (torch.ones(64).bfloat16(), "[64] of torch.bfloat16"),
    ):
        assert f"q_proj: {change}, not [64] of torch.float32, for its bias" in refused(run, kept, {name: bias})
    assert "q_proj: 'bias' is missing" in refused(run, kept, {name: None})


@NEEDS_KERNELS
def test_packed_weights_of_another_dtype_are_refused(kept: Path) -> None:
    run = job(GOLDENS / "llama3")
    load_engine(run, 3)
    other = {"model.layers.0.mlp.up_proj.tiles": torch.ones(11, 32, 16, 2).bfloat16()}  # a model in bfloat16 has them
    assert "up_proj: packed weights of torch.bfloat16, not torch.float32" in refused(run, kept, other)


def test_a_permutation_is_compared(tmp_path: Path, kept: Path) -> None:
    """GPTQ's order of channels by activity, whose groups are found during calibration."""
    write_llama(tmp_path / "source", tie_word_embeddings=False, hidden_size=64, intermediate_size=96)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f'{{"prompt_token_ids": {list(range(5 + i, 60 + i))}}}\n' for i in range(12)))
    run = job(tmp_path / "source", CALIBRATED["int4 gptq, groups on the way"])
    run = replace(run, calibrate=replace(run.calibrate, data=str(data), num_samples=4, sequence_length=20))
    load_engine(run, 3)
    (file,) = kept.iterdir()
    name, permutation = next(
        (name, tensor) for name, tensor in load_file(file).items() if name.endswith(".permutation")
    )
    size = len(permutation)
    for other, message in (
        (permutation[:-1].clone(), f"[{size - 1}] of torch.int64, not [{size}] of torch.int64, for its permutation"),
        (permutation.int(), f"[{size}] of torch.int32, not [{size}] of torch.int64, for its permutation"),
        (permutation + 1, f"permutation does not name each of {size} inputs once"),
        (permutation * 0, f"permutation does not name each of {size} inputs once"),
        (permutation - 2**62, f"permutation does not name each of {size} inputs once"),
    ):
        assert message in refused(run, kept, {name: other})


@each("scheme", ["int8", "fp8"])
def test_a_permutation_of_weights_that_have_none_is_refused(scheme: str, kept: Path) -> None:
    for file in kept.glob("*"):  # of the scheme before
        file.unlink()
    run, name = job(GOLDENS / "llama3", SCHEMES[scheme]), "model.layers.0.mlp.up_proj.permutation"
    load_engine(run, 3)
    assert f"{name} belongs to no layer" in refused(run, kept, {name: torch.arange(64).flip(0)})


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path, torch.Tensor]:
    """Return a job, its packed file, and the logits."""
    folder, run = tmp_path_factory.mktemp("packed"), job(GOLDENS / "llama_tied_bias", SCHEMES["int8"])
    with pytest.MonkeyPatch.context() as context:
        context.setenv("QUINTET_OUTPUTS", str(folder))
        logits = all_logits(load_engine(run, 3), PROMPT)
    (file,) = (folder / "packed").iterdir()
    return run, file, logits


@pytest.mark.long
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutations=MUTATIONS)
def test_a_damaged_header_is_noticed_or_harmless(
    packed: tuple[RunConfig, Path, torch.Tensor], tmp_path: Path, mutations: list[tuple[str, float, int]]
) -> None:
    """The logits equal the checkpoint's, or one line gives the reason why there are none."""
    run, file, expected = packed
    content, message = file.read_bytes(), ""
    damaged = mutated(content, mutations, head=8 + int.from_bytes(content[:8], "little"))
    (tmp_path / "packed").mkdir(exist_ok=True)
    (tmp_path / "packed" / file.name).write_bytes(damaged)
    with pytest.MonkeyPatch.context() as context:
        context.setenv("QUINTET_OUTPUTS", str(tmp_path))
        try:
            assert all_logits(load_engine(run, 3), PROMPT).equal(expected)
        except UserError as error:
            message = str(error)
    assert "\n" not in message


@pytest.mark.parametrize("quant", [QuantConfig(QuantScheme.int4), SCHEMES["fp8"]])
def test_packed_codes_of_another_size_are_refused(quant: QuantConfig, kept: Path) -> None:
    run = job(GOLDENS / "llama3", quant)
    load_engine(run, 3)
    (file,) = kept.iterdir()
    change(file, {"lm_head.packed": torch.zeros(100, dtype=torch.uint8)})
    with pytest.raises(UserError, match=r"a packed weight of \d+ bytes(, in groups.*)? cannot be \(100,\) torch.uint8"):
        load_engine(run, 3)


def test_several_starts_at_once_make_one_file(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with ThreadPoolExecutor(4) as pool:
        engines = list(pool.map(lambda _: load_engine(job(GOLDENS / "llama3"), 3), range(4)))
    expected = all_logits(engines[0], PROMPT)
    assert all(all_logits(engine, PROMPT).equal(expected) for engine in [*engines, mapped(job(GOLDENS / "llama3"))])
    assert len(list(kept.iterdir())) == 1


def test_a_full_disk_leaves_nothing(kept: Path) -> None:
    message = (
        f"model.keep_packed=true, but {kept}/llama3-.* cannot be written .No space left.*: make room for it, or leave"
    )
    with (
        patch("models.formats.safetensors_writer.os.fsync", side_effect=OSError(28, os.strerror(28))),
        pytest.raises(UserError, match=message),
    ):
        load_engine(job(GOLDENS / "llama3"), 3)
    assert not list(kept.iterdir())


def test_a_file_in_the_place_of_the_folder_is_named(kept: Path) -> None:
    kept.touch()
    with pytest.raises(
        UserError, match=f"{kept}/llama3-.* cannot be written .File exists.: make room for it, or leave"
    ):
        load_engine(job(GOLDENS / "llama3"), 3)


def test_where_nothing_can_be_kept() -> None:
    with pytest.raises(UserError, match="model.keep_packed=true is not used by model.weights=random"):
        ModelConfig("x", keep_packed=True, weights=Weights.random)
    run = job(GOLDENS / "llama3")
    source = resolve_model(run.model)
    plan = plan_model(run.model, run.quant, source, torch.device("cuda"), packed=False)
    with pytest.raises(UserError, match="model.keep_packed=true is not used by device=cuda"):
        load_packed(plan, lambda: None)
