"""The layers that a `quant` option applies to."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from conf.decoding import warn_once
from conf.errors import UserError
from conf.quantization import (
    Activations,
    QuantConfig,
    QuantizedFormat,
    QuantMethod,
    QuantScheme,
    SparsityConfig,
    SparsityMethod,
    SparsityPattern,
)
from models.causal_lm import CausalLM
from models.config import ConfigReader
from models.linear_layers import checkpoint_parts, linear_specs
from models.registry import find_architecture
from pipelines.loading.load_engine import load_engine
from quantization.file_layout import file_layout
from quantization.importance import find_entry_rows
from quantization.layouts.base import StoredWeight
from quantization.layouts.floats import FloatLayout
from quantization.linear import IntMethod, method_of
from quantization.mixtures import resolve_mixture
from quantization.plan import plan, plan_pruning, quantize_while_loading
from quantization.scheme import LinearScheme, parse_format
from quantization.weight_format import WeightFormat, of_blocks, quantize
from tests.helpers.builders import run_config
from tests.helpers.cases import each
from tests.helpers.catalog import GOLDENS

WANDA = SparsityConfig(SparsityMethod.wanda)


def model_of(family: str, **changes: int) -> CausalLM:
    reader = ConfigReader(ConfigReader.from_folder(GOLDENS / family).values | changes, "config.json")
    architecture = find_architecture(reader)
    with torch.device("meta"):
        return architecture.build(architecture.read_config(reader))


def int8(**changes: Any) -> QuantConfig:
    return QuantConfig(QuantScheme.int8, **changes)


def test_all_linear_layers_but_routers_and_weights_with_other_uses() -> None:
    schemes = plan(model_of("llama3"), int8())
    assert len(schemes) == 2 * 7 + 1
    assert set(schemes.values()) == {LinearScheme(WeightFormat(8))}
    names = linear_specs(model_of("mixtral"))
    assert "model.layers.0.block_sparse_moe.experts.3.w2" in names
    assert not [name for name in names if name.endswith("gate")]
    names = linear_specs(model_of("qwen2_moe"))
    assert "model.layers.0.mlp.shared_expert.up_proj" in names
    assert not [name for name in names if name.endswith(("gate", "shared_expert_gate"))]


def test_embeddings() -> None:
    """A tied one has the head's codes. The rows of another one are the values of its codes; files refuse that option."""
    model = model_of("llama_tied_bias")
    quantize_while_loading(model, int8(skip=["model.layers.*"]))
    assert linear_specs(model)["lm_head"].shape == (512, 64)
    assert checkpoint_parts(model)["model.embed_tokens.weight"] == (model.embedding, "weight")
    assert isinstance(model.embedding.method, IntMethod)
    for format, bits in (("int8", 8), ("int4/32", 4), ("q5_0", 5), ("none", 32)):
        run = replace(run_config(GOLDENS / "llama3", allow_pickle=True), quant=int8(embedding=format))
        model = load_engine(run, 1).executor.model
        rows = model.embedding(torch.arange(model.config.vocab_size))
        expected = load_file(GOLDENS / "llama3" / "model.safetensors")["model.embed_tokens.weight"].float()
        scheme = parse_format("quant.embedding", format)
        assert rows.equal(expected if scheme is None else quantize(expected, scheme.weights).dequantize())
        assert model.embedding.method.num_bytes(torch.float32) * 8 < (bits + 1.5) * expected.numel()
    for family, format, message in (
        ("llama_tied_bias", "int8", r"is its head's matrix: give quant.overrides=\{lm_head:int8\}"),
        ("llama3", "q4_k", "groups of 256, which do not divide the embedding's 64 channels"),
        ("llama3", "int3", "quant.embedding=int3 is not allowed: give none, int8"),
    ):
        with pytest.raises(UserError, match=message):
            quantize_while_loading(model_of(family), int8(embedding=format))
    with pytest.raises(UserError, match="no file holds it: leave it out"):
        file_layout(model_of("llama3"), int8(embedding="int8"), QuantizedFormat.compressed_tensors)
    blocks = method_of(
        parse_format("quant.overrides", "q5_0"), FloatLayout((32, 64), False, of_blocks("Q5_0")), (32, 64)
    )  # type: ignore[arg-type]
    with pytest.raises(UserError, match="q5_0 is for a CPU: give int8 or int4 in quant.overrides"):
        blocks.hold(StoredWeight(quantize(torch.ones(32, 64), of_blocks("Q5_0"))), torch.device("meta"))
    with pytest.raises(UserError, match="quant=auto chooses block types too"):
        file_layout(model_of("llama3"), QuantConfig(QuantScheme.auto), QuantizedFormat.compressed_tensors)


def test_gpt2_is_stored_transposed() -> None:
    layer = linear_specs(model_of("gpt2"))["transformer.h.0.attn.c_attn"]
    assert (layer.shape, layer.is_transposed, layer.has_bias) == ((192, 64), True, True)


@each("family", ["llama3", "chatglm2", "baichuan2-7b", "llama_tied_bias"])
def test_lm_head_is_every_models_head(family: str) -> None:
    model = model_of(family)
    head = next(name for name, module in model.named_modules() if module is model.head)
    assert head not in plan(model, int8(skip=["lm_head"]))


def test_skips_and_overrides_are_globs() -> None:
    config = QuantConfig(
        QuantScheme.int4, group_size=32, skip=["*.down_proj"], overrides={"*.v_proj": "int8", "lm_head": "int4/64"}
    )
    schemes = plan(model_of("llama3"), config)
    assert "model.layers.1.mlp.down_proj" not in schemes
    assert schemes["model.layers.1.self_attn.v_proj"] == LinearScheme(WeightFormat(8))
    assert schemes["model.layers.1.self_attn.q_proj"] == LinearScheme(WeightFormat(4, group_size=32))
    assert schemes["lm_head"] == LinearScheme(WeightFormat(4, group_size=64))
    assert "lm_head" not in plan(model_of("llama3"), int8(overrides={"lm_head": "none"}))


def test_groups_that_divide_each_layer(caplog: pytest.LogCaptureFixture) -> None:
    """quant=int4 sets no size; one line reports the layers that 128 does not divide. Overrides have their own."""
    warn_once.cache_clear()
    config = QuantConfig(
        QuantScheme.int4, group_size=None, overrides={"lm_head": "int8", "*.v_proj": "int4/32"}, skip=["*.down_proj"]
    )
    model = model_of("llama3")  # 64 inputs, and 176 of down_proj, which none of the sizes divides
    for _ in range(2):
        sizes = {name: scheme.weights.group_size for name, scheme in plan(model, config).items()}
    assert sizes == {name: None if name == "lm_head" else 32 if name.endswith("v_proj") else 64 for name in sizes}
    assert caplog.messages == ["10 layers have groups of 64, because 128 does not divide their input channels"]
    with pytest.raises(UserError, match="down_proj has 176 input channels, which groups of 128 do not divide"):
        plan(model, replace(config, skip=[]))


@each(
    ("config", "message"),
    [
        (lambda: int8(skip=["*.q_porj"]), r"quant.skip has '\*.q_porj', which matches no layer: there are .*q_proj"),
        (lambda: int8(overrides={"head": "int4"}), "quant.overrides has 'head', which matches no layer"),
        (
            lambda: int8(overrides={"lm_head": "int3"}),
            "quant.overrides.lm_head=int3 is not allowed: give none, int8, int8/32, ",
        ),
        (lambda: int8(overrides={"lm_head": "int4/"}), "quant.overrides.lm_head=int4/ is not allowed"),
        (lambda: int8(overrides={"lm_head": "none/32"}), "quant.overrides.lm_head=none/32 is not allowed"),
        (
            lambda: int8(group_size=128),
            r"self_attn.q_proj has 64 input channels, which groups of 128 do not divide: give a quant.group_size that does",
        ),
    ],
)
def test_impossible_plans_are_refused(config: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        quantize_while_loading(model_of("llama3"), config())


def test_the_head_routers_and_skipped_layers_are_not_pruned() -> None:
    mixtral = model_of("mixtral")
    names = plan_pruning(mixtral, QuantConfig(sparsity=WANDA, skip=["model.layers.0.*", "lm_head"]))
    assert len(names) == 4 + 3 * 4  # attention's and those of four experts, in the second of two layers
    assert all(name.startswith("model.layers.1.") and "gate" not in name for name in names)
    odd, pattern = model_of("llama3", intermediate_size=90), SparsityPattern["2:4"]
    four = "down_proj has 90 input channels, which groups of 4 do not divide: give quant.sparsity.pattern=unstructured, or quant.sk"
    for model, config, message in (
        (mixtral, QuantConfig(sparsity=WANDA, skip=["*"]), "quant.skip leaves none of .* layers to prune"),
        (mixtral, QuantConfig(sparsity=WANDA, skip=["*.k_prj"]), "quant.skip has '[*].k_prj', which matches no layer"),
        (odd, QuantConfig(sparsity=replace(WANDA, pattern=pattern)), four),
    ):
        with pytest.raises(UserError, match=message):
            plan_pruning(model, config)


@each(
    ("values", "message"),
    [
        (
            {"scheme": QuantScheme.none, "group_size": 32},
            "quant.group_size=32 is not used by quant=none: leave it at -1",
        ),
        ({"scheme": QuantScheme.int8, "symmetric": False}, "quant.symmetric=false is not used by quant=int8"),
        (
            {"scheme": QuantScheme.int8, "group_size": 0},
            "quant.group_size=0 is not allowed: give 32, 64, 128, -1 or null",
        ),
        ({"scheme": QuantScheme.a8w8}, "quant.activations=none is not allowed with quant=a8w8: give dynamic or static"),
        (
            {"scheme": QuantScheme.int4, "activations": Activations.static},
            "quant.activations=static is not allowed with quant=int4: give none or auto",
        ),
        (
            {"scheme": QuantScheme.fp8, "activations": Activations.auto},
            "quant.activations=auto is not allowed with quant=fp8: give dynamic or static",
        ),
        ({"scheme": QuantScheme.none, "skip": ["lm_head"]}, r"quant.skip=\['lm_head'\] is not used by quant=none"),
        (
            {"scheme": QuantScheme.int8, "shift": True},
            "quant.shift=true is not used by quant.method=rtn: leave it at false",
        ),
    ],
)
def test_options_that_nothing_would_use(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        QuantConfig(**values)


def test_blocks_that_do_not_divide_a_layer_are_shorter_or_floats(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    schemes_by_format = {}
    for scheme in ("q3_k", "q4_k", "q5_k", "q6_k", "q5_1", "nvfp4"):
        model = model_of("llama3", hidden_size=256, intermediate_size=288)
        schemes = plan(model, QuantConfig(QuantScheme[scheme], overrides={"lm_head": "q6_k", "*.v_proj": "int4/32"}))
        names = ("layers.0.self_attn.q_proj", "layers.0.self_attn.v_proj", "layers.1.mlp.down_proj")
        schemes_by_format[scheme] = [str(schemes[f"model.{name}"]) for name in names] + [str(schemes["lm_head"])]
    assert schemes_by_format == {
        "q3_k": ["Q3_K", "int4 groups of 32", "int4 groups of 32", "Q6_K"],
        "q4_k": ["Q4_K", "int4 groups of 32", "Q5_0", "Q6_K"],
        "q5_k": ["Q5_K", "int4 groups of 32", "Q5_1", "Q6_K"],
        "q6_k": ["Q6_K", "int4 groups of 32", "Q8_0", "Q6_K"],
        "q5_1": ["Q5_1", "int4 groups of 32", "Q5_1", "Q6_K"],
        "nvfp4": ["NVFP4", "int4 groups of 32", "MXFP4", "Q6_K"],
    }
    assert not caplog.messages
    schemes = plan(model_of("llama3", intermediate_size=90), QuantConfig(QuantScheme.q4_1))
    assert not [name for name in schemes if name.endswith("down_proj")]
    assert caplog.messages == [
        "2 layers stay in floats, because blocks of 32 do not divide their channels (model.layers.0.mlp.down_proj)"
    ]


def test_block_schemes_that_cannot_be_are_refused() -> None:
    mixture = QuantConfig(QuantScheme.q4_k_m)
    with pytest.raises(UserError, match=r"model_type='opt'.*: give quant=q4_k"):
        resolve_mixture(mixture, model_of("llama3"), "opt")
    with pytest.raises(UserError, match=r"quant=q4_k_m .*: give task=convert convert.format=gguf"):
        file_layout(model_of("llama3"), mixture, QuantizedFormat.compressed_tensors)
    for changes in ({"group_size": 32}, {"activations": Activations.auto}, {"method": QuantMethod.gptq}):
        with pytest.raises(UserError, match="quant.* not "):
            replace(mixture, **changes)
    for scheme, remedy in ((QuantScheme.int4, "rtn, gptq or awq"), (QuantScheme.none, "rtn, or quant=")):
        refused = f"quant.method=imatrix is not allowed with quant={scheme.name}: give {remedy}"
        with pytest.raises(UserError, match=refused):
            QuantConfig(scheme, QuantMethod.imatrix)
    with pytest.raises(UserError, match=r"llama.cpp's names .* not known for model_type='opt': give quant.method=rtn"):
        find_entry_rows(model_of("opt"), "opt")
