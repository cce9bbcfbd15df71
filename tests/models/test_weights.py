"""A checkpoint's tensors become a model's parameters: every value by its name, and all faults in one error."""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from conf.errors import UserError
from models.causal_lm import CausalLM
from models.config import ConfigReader
from models.formats.base import WeightFile
from models.formats.huggingface import SafetensorsFile
from models.linear_layers import other_parameters
from models.weights import (
    CastFile,
    checkpoint_dtype,
    initialise_randomly,
    load_weights,
    match_tensors,
    refuse_damaged,
    stored_dtype,
)
from tests.helpers.cases import each
from tests.helpers.meta_device import DEEPSEEK, build, golden

CPU = torch.device("cpu")
LLAMA = {
    "model_type": "llama", "vocab_size": 24, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 32,
}  # fmt: skip
ROUTER = {f"model.layers.1.mlp.gate.{name}" for name in ("weight", "e_score_correction_bias")}


class MemoryFile:
    """Tensors as a weight file."""

    def __init__(self, tensors: dict[str, Tensor], is_mapped: bool = False) -> None:
        self.path = Path("/nowhere/model.safetensors")
        self.tensors, self.is_mapped = tensors, is_mapped
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in tensors.items()}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.tensors[name]) for name in names)


def tensors_of(model: CausalLM) -> dict[str, Tensor]:
    """Return other values for every parameter."""
    torch.manual_seed(1)
    return {name: torch.randn(parameter.shape) for name, parameter in model.named_parameters()}


def load(
    model: CausalLM, *files: WeightFile, dtype: torch.dtype = torch.float32, ignored: tuple[str, ...] = ()
) -> list[tuple[int, int]]:
    """Load the tensors and return the reported progress."""
    told: list[tuple[int, int]] = []
    load_weights(model, list(files), ignored, dtype, CPU, lambda done, total: told.append((done, total)))
    return told


@each("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_is_the_tensor_of_its_name(dtype: torch.dtype) -> None:
    """In the model's dtype, except tensors that stay float32; from any number of files."""
    model = build(DEEPSEEK)
    tensors = tensors_of(model)
    names = list(tensors)
    files = [MemoryFile({name: tensors[name] for name in part}) for part in (names[::2], names[1::2])]
    told = load(model, *files, dtype=dtype)
    assert {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32} == (
        ROUTER if dtype == torch.bfloat16 else set(names)
    )
    for name, parameter in model.named_parameters():
        assert parameter.equal(tensors[name].to(parameter.dtype)), name
        assert not parameter.requires_grad
    total = sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize
    assert {all_bytes for _, all_bytes in told} == {total}
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (total, total)


def test_views_of_a_file_are_copied_and_other_tensors_are_not() -> None:
    """Linear layers hold a copy in either case."""
    for is_mapped in (True, False):
        model = build(LLAMA)
        tensors = tensors_of(model)
        load(model, MemoryFile(tensors, is_mapped))
        shared = {n for n, parameter in model.named_parameters() if parameter.data_ptr() == tensors[n].data_ptr()}
        assert shared == (set() if is_mapped else set(other_parameters(model)))


def test_names_may_lack_the_trunks_own() -> None:
    """As of a checkpoint that was saved without its head."""
    model = golden("gpt2")
    tensors = tensors_of(model)
    load(model, MemoryFile({name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}))
    assert all(parameter.equal(tensors[name]) for name, parameter in model.named_parameters())


@each("tied", [True, False])
def test_a_tied_head_may_be_there_twice_and_another_may_not_be_missing(tied: bool) -> None:
    model = build(LLAMA | {"tie_word_embeddings": tied})
    tensors = tensors_of(model)
    assert ("lm_head.weight" in tensors) is not tied
    load(model, MemoryFile(tensors | {"lm_head.weight": torch.zeros(24, 8)} if tied else tensors))
    assert model.head.method.weight.equal(tensors["model.embed_tokens.weight" if tied else "lm_head.weight"])
    if not tied:
        del tensors["lm_head.weight"]
        with pytest.raises(UserError, match=r"missing: lm_head\.weight$"):
            load(build(LLAMA), MemoryFile(tensors))


def test_all_differences_are_in_one_error() -> None:
    model = build(LLAMA)
    tensors = tensors_of(model)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(8, 9)
    tensors["odd"] = torch.zeros(1)
    twice = MemoryFile({"model.embed_tokens.weight": torch.zeros(24, 8)})
    faults = (
        r"/nowhere does not hold the model that its config describes: missing: model\.norm\.weight; unexpected: odd; "
        r"found twice: model\.embed_tokens\.weight; "
        r"wrong shape: model\.layers\.0\.self_attn\.q_proj\.weight \[8, 9\], expected \[8, 8\]$"
    )
    with pytest.raises(UserError, match=faults):
        load(model, MemoryFile(tensors), twice)
    assert all(parameter.is_meta for parameter in model.parameters())  # nothing was read
    with pytest.raises(UserError, match=r"missing: (model\.[a-z0-9_.]+, ){7}model\.[a-z0-9_.]+ and 13 more$"):
        load(model, MemoryFile({}))


def test_tensors_that_the_model_computes_itself_are_left() -> None:
    model = build(DEEPSEEK | {"num_nextn_predict_layers": 1})
    tensors = tensors_of(model)
    others = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(4),
        "model.layers.2.eh_proj.weight": torch.rand(4),
    }
    load(model, MemoryFile(tensors | others), ignored=("inv_freq",))
    with pytest.raises(UserError, match=r"unexpected: model\.layers\.0\.self_attn\.rotary_emb\.inv_freq$"):
        load(model, MemoryFile(tensors | others))
    with pytest.raises(UserError, match=r"unexpected: model\.layers\.3\.eh_proj\.weight$"):
        load(model, MemoryFile(tensors | {"model.layers.3.eh_proj.weight": torch.rand(4)}))


@each("dtype", [torch.int32, torch.int8, torch.float8_e4m3fn])
def test_codes_where_floats_belong(dtype: torch.dtype) -> None:
    model = build(LLAMA)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = tensors_of(model)
    tensors[name] = tensors[name].to(dtype)
    with pytest.raises(
        UserError, match=f"{name} is {dtype}, but its layer is not quantised: expected floats of 16 or 32"
    ):
        load(model, MemoryFile(tensors))


def test_tensors_with_nan_are_loaded_and_named(caplog: pytest.LogCaptureFixture) -> None:
    model = build(LLAMA)
    tensors = tensors_of(model)
    names = ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"]
    for name in names:
        tensors[name][3, 4] = torch.nan
    tensors["model.norm.weight"][:2] = torch.tensor([torch.inf, -torch.inf])  # whose sum is NaN
    with caplog.at_level(logging.WARNING):
        load(model, MemoryFile(tensors))
    assert [record.getMessage() for record in caplog.records] == [f"2 tensors hold NaN: {', '.join(names)}"]
    with pytest.raises(
        UserError, match=rf"NaN or infinite numbers: {', '.join([*names, 'model.norm.weight'])}: the files"
    ):
        refuse_damaged(model)


def test_large_numbers_are_not_damage() -> None:
    model = build(LLAMA)
    tensors = {name: tensor.fill_(3e38) for name, tensor in tensors_of(model).items()}  # whose sum is infinite
    load(model, MemoryFile(tensors))
    refuse_damaged(model)


def test_a_checkpoints_dtype_is_the_configs_or_the_first_tensors() -> None:
    file, empty = MemoryFile({"b": torch.ones(1).half(), "a": torch.ones(1)}), MemoryFile({})
    assert checkpoint_dtype([file]) == torch.float16
    for values, expected in [
        ({"torch_dtype": "bfloat16", "dtype": "float32"}, "bfloat16"),
        ({"dtype": "float32"}, "float32"),
        ({}, "float16"),
    ]:
        assert stored_dtype(ConfigReader(values, "config.json"), [file]) == expected
    assert stored_dtype(ConfigReader({}, "config.json"), []) == "float32"
    with pytest.raises(UserError, match=r"/nowhere/model\.safetensors holds no tensors"):
        checkpoint_dtype([empty])
    for wrong in ("float64", 3):
        with pytest.raises(
            UserError, match=rf"dtype {wrong!r} is not supported: give model.dtype=float32\|bfloat16\|float16"
        ):
            stored_dtype(ConfigReader({"torch_dtype": wrong}, "config.json"), [file])


def test_random_weights_are_the_same_every_time() -> None:
    models = [golden("gpt2"), golden("gpt2")]
    for model in models:
        initialise_randomly(model, torch.float32, CPU)
    first, second = (dict(model.named_parameters()) for model in models)
    assert all(parameter.equal(second[name]) for name, parameter in first.items())
    for name, parameter in first.items():
        if parameter.ndim == 1:
            assert parameter.eq(0.0 if name.endswith("bias") else 1.0).all()
    matrix = first["transformer.h.0.mlp.c_fc.weight"]
    # sample deviations of normal numbers: five of their own standard deviations
    assert abs(float(matrix.std()) - 0.02) < 5 * 0.02 / (2 * matrix.numel()) ** 0.5
    assert not matrix.equal(first["transformer.h.1.mlp.c_fc.weight"])


def test_cast_is_what_every_model_of_that_dtype_holds(tmp_path: Path) -> None:
    model = build(DEEPSEEK)
    tensors = {name: torch.randn(parameter.shape) for name, parameter in model.named_parameters()}
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(4)}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    file = SafetensorsFile(tmp_path / "model.safetensors")
    cast = CastFile(file, model, match_tensors(model, [file], ("inv_freq",)), torch.bfloat16)
    kept = {name for name, dtype in cast.dtypes.items() if dtype == torch.float32}
    assert kept == ROUTER | extra.keys()  # as loading keeps the router
    for name, tensor in cast.read(file.shapes):
        assert tensor.dtype == cast.dtypes[name]
        assert torch.equal(tensor, (tensors | extra)[name].to(tensor.dtype))
