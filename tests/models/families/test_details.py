"""Details of single families that their row of the table cannot express: files that transformers does not write, and
special numbers."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from conf.decoding import DecodeConfig
from conf.errors import UserError
from models.config import ConfigReader
from models.families import bloom, gemma2, gemma3
from models.families.telechat import read_config
from models.layers.norm import RMSNorm
from models.layers.rotary import RotaryEmbedding
from models.registry import find_architecture
from tests.helpers.builders import all_logits, complete, engine_of
from tests.helpers.cases import each
from tests.helpers.catalog import ROWS
from tests.helpers.dense_families import SCALED
from tests.helpers.family import FULL, SLIDING
from tests.helpers.hybrid_families import HYBRID, rename_dense_layers
from tests.helpers.oracle import assert_equals_transformers, random_prompts


def change_file(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_blooms_slopes_are_float32_on_the_cpu_whatever_the_model_is() -> None:
    config = bloom.read_config(ConfigReader(ROWS["bloom"].json({}), "here"))
    with torch.device("meta"):
        model = bloom.Bloom(config)
    slopes = model.bfloat16().slopes.on(torch.device("cpu"))
    assert slopes.dtype == torch.float32
    assert slopes.tolist() == [0.25, 0.0625, 0.015625, 0.00390625]


def test_gemmas_norm_equals_transformers_in_bfloat16() -> None:
    generator = torch.Generator().manual_seed(0)
    theirs = transformers.models.gemma2.modeling_gemma2.Gemma2RMSNorm(48).bfloat16()
    theirs.weight.data.normal_(0, 0.3, generator=generator)
    ours = RMSNorm(48, 1e-6, gemma2.WEIGHT_OFFSET)
    ours.weight = theirs.weight
    x = torch.randn(7, 48, generator=generator).bfloat16()
    assert torch.equal(ours(x), theirs(x))


def test_dense_layers_of_kimi_linear_have_either_name(tmp_path: Path) -> None:
    row, prompt = HYBRID["kimi_linear"], [5, 6, 7]
    row.write(tmp_path, **row.variants[0])
    expected = all_logits(engine_of(tmp_path), prompt)
    rename_dense_layers(tmp_path / "model.safetensors")
    assert "model.layers.0.mlp.up_proj.weight" in load_file(tmp_path / "model.safetensors")
    assert all_logits(engine_of(tmp_path), prompt).equal(expected)


def test_settings_of_gemma3s_first_files(tmp_path: Path) -> None:
    """They name the rotary bases and the pattern of windows separately."""
    rope = {FULL: SCALED, SLIDING: {"rope_type": "default", "rope_theta": 100.0}}
    sizes = ROWS["gemma3"].sizes | {"num_hidden_layers": 4, "sliding_window_pattern": 3}
    reference = ROWS["gemma3"].write(tmp_path, **sizes, rope_parameters=rope)
    old = {"rope_theta": 3e4, "rope_local_base_freq": 100.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    settings = {**sizes, **old, "model_type": "gemma3_text", "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert_equals_transformers(tmp_path, reference, random_prompts(96))


def test_gemma3_has_defaults_for_keys_that_its_files_leave_out() -> None:
    """google/gemma-3-4b-it names only the sizes of its layers; its context is the context after scaling."""
    config_json = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = gemma3.read_config(ConfigReader(config_json, "config.json"))
    reference = transformers.Gemma3TextConfig(**config_json)
    assert config.windows == tuple(1024 if kind == SLIDING else None for kind in reference.layer_types)
    names = ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "query_pre_attn_scalar")
    assert [getattr(config, name) for name in names] == [getattr(reference, name) for name in names]
    assert (config.rotary.theta, config.rotary.factor) == (1e6, 8.0)
    assert (config.sliding_rotary.theta, config.sliding_rotary.factor) == (1e4, 1.0)
    assert config.context_length == reference.max_position_embeddings == 131072


@each("family", ["glm", "glm4"])
def test_the_older_spelling_of_glm_is_the_same_model(family: str, tmp_path: Path) -> None:
    rope = {"rope_theta": 500.0, "partial_rotary_factor": 0.25}
    ROWS[family].write(tmp_path, rope_parameters=dict(rope))
    prompt = random_prompts(96)[3]
    logits = all_logits(engine_of(tmp_path), prompt)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    del config["rope_parameters"]
    file.write_text(json.dumps(config | rope), encoding="utf-8")
    assert all_logits(engine_of(tmp_path), prompt).equal(logits)
    reader = ConfigReader.from_folder(tmp_path)
    find_architecture(reader).read_config(reader)
    assert reader.unread() == []


def test_names_of_the_350m_checkpoint_of_opt(tmp_path: Path) -> None:
    reference = ROWS["opt"].write(tmp_path, do_layer_norm_before=False, word_embed_proj_dim=32)
    file = tmp_path / "model.safetensors"
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}, file)
    assert_equals_transformers(tmp_path, reference, random_prompts(96, (7,)))


@each(
    "family, added",
    [
        ("glm4_moe", {"model.layers.3.eh_proj.weight": (64, 128), "model.layers.3.enorm.weight": (64,)}),
        ("ernie4_5_moe", {"model.mtp_block.0.mlp.up_proj.weight": (3,)}),
    ],
)
def test_layers_for_more_tokens_are_left_out(family: str, added: dict[str, tuple[int, ...]], tmp_path: Path) -> None:
    ROWS[family].write(tmp_path)
    if family == "glm4_moe":
        change_file(tmp_path, num_nextn_predict_layers=1)
    before = all_logits(engine_of(tmp_path), [5, 6, 7])
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {name: torch.zeros(shape) for name, shape in added.items()}, tmp_path / "model.safetensors")
    assert torch.equal(all_logits(engine_of(tmp_path), [5, 6, 7]), before)
    if family == "glm4_moe":
        change_file(tmp_path, num_nextn_predict_layers=0, num_mtp_layers=0)
        with pytest.raises(UserError, match=r"unexpected: model\.layers\.3\.eh_proj\.weight"):
            engine_of(tmp_path)


def test_log_probabilities_of_a_mixture_are_the_same_to_the_bit_in_any_company(tmp_path: Path) -> None:
    ROWS["qwen2_moe"].write(tmp_path)
    engine = engine_of(tmp_path)
    prompts = random_prompts(96, (5, 1, 40, 17, 2, 16))
    decode = DecodeConfig(max_new_tokens=12, logprobs=5, prefix_cache=False)
    alone = [complete(engine, [prompt], decode)[0] for prompt in prompts]
    assert complete(engine, prompts, decode) == alone


@each("base_seqlen, alpha", [(128, 1), (127, 3), (64, 3), (50, 7), (200, 1)], quick=[(64, 3)])
def test_longer_training_of_telechat_grows_the_base(base_seqlen: int, alpha: int, tmp_path: Path) -> None:
    """The original code's formula: 2^ceil(log2(training_seqlen / base_seqlen) + 1) - 1, at least 1."""
    theta = 10000.0 * alpha ** (16 / 14)  # heads of 16 channels
    reference = ROWS["telechat"].write(tmp_path, rope_theta=theta)
    change_file(tmp_path, base_seqlen=base_seqlen)
    assert_equals_transformers(tmp_path, reference, random_prompts(96, (5, 40)))


def test_telechats_first_files_do_not_name_the_base() -> None:
    config = read_config(ConfigReader(ROWS["telechat"].json({}), "config.json"))
    cos, _ = RotaryEmbedding(config.rotary).angles(torch.tensor([5]), torch.tensor([1]), torch.float32)
    theta = 10000.0 * 3 ** (16 / 14)  # 8192 is twice the 4096 of their code
    expected = [math.cos(5 * theta ** (-2 * i / 16)) for i in range(8)]
    torch.testing.assert_close(cos[0], torch.tensor(expected), atol=1e-6, rtol=0)  # float32 angles of at most 5
