"""Adapters of rows: supported files, and adapters that must be merged."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from conf.errors import UserError
from models.adapters import read_adapter
from models.formats.huggingface import SafetensorsFile
from pipelines.engine import Engine
from tests.helpers.adapters import ALL_LINEAR, change_adapter, write_adapter
from tests.helpers.builders import engine_of, write_llama
from tests.helpers.cases import each

QUERY = "base_model.model.model.layers.0.self_attn.q_proj"
EVERY_TENSOR: dict[str, None] = {
    f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{factor}.weight": None
    for layer in range(2)
    for factor in "AB"
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "base"
    write_llama(folder)
    return folder


@pytest.fixture(scope="module")
def engine(base: Path) -> Engine:
    return engine_of(base)


def test_factors_and_scales(base: Path, engine: Engine, tmp_path: Path) -> None:
    config = {
        "r": 4,
        "lora_alpha": 6,
        "use_rslora": True,
        "rank_pattern": {"down_proj": 2},
        "alpha_pattern": {"v_proj": 8},
    }
    folder = write_adapter(tmp_path / "adapter", base, LlamaForCausalLM, target_modules=ALL_LINEAR, **config)
    adapter = read_adapter(folder, engine.executor.model, torch.bfloat16, {})
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(adapter.factors) == len(tensors) / 2 == 2 * len(ALL_LINEAR)
    for name, factors in adapter.factors.items():
        for factor, tensor in (("A", factors.a), ("B", factors.b)):
            assert torch.equal(tensor, tensors[f"base_model.model.{name}.lora_{factor}.weight"].bfloat16())
        rank, alpha = (2 if "down_proj" in name else 4), (8 if "v_proj" in name else 6)
        assert factors.scale == alpha / rank**0.5


def test_the_digest_is_of_the_content(base: Path, engine: Engine, tmp_path: Path) -> None:
    def digest(folder: Path) -> str:
        return read_adapter(folder, engine.executor.model, torch.float32, {}).digest

    one, same = (
        write_adapter(tmp_path / name, base, LlamaForCausalLM, r=2, target_modules=["q_proj"])
        for name in ("one", "same")
    )
    assert digest(one) == digest(same)
    change_adapter(same, {"lora_alpha": 9}, {})
    assert digest(one) != digest(same)
    change_adapter(one, {}, {f"{QUERY}.lora_A.weight": torch.ones(2, 64)})
    assert len({digest(one), digest(same)}) == 2


def test_read_adapters_stay_when_the_file_changes(base: Path, engine: Engine, tmp_path: Path) -> None:
    """The file changes in place, which a mapping of it would see."""
    folder = write_adapter(tmp_path / "adapter", base, LlamaForCausalLM, r=2, target_modules=["q_proj"])
    file = folder / "adapter_model.safetensors"
    expected = load_file(file)[f"{QUERY}.lora_A.weight"].clone()
    adapter = read_adapter(folder, engine.executor.model, torch.float32, {})
    with open(file, "r+b") as stream:
        stream.write(bytes(file.stat().st_size))
    assert adapter.factors["model.layers.0.self_attn.q_proj"].a.equal(expected)


def test_a_file_that_is_replaced_while_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "adapter_model.safetensors"
    save_file({"a": torch.ones(2, 3)}, file)
    opened = SafetensorsFile(file)
    assert opened.read_whole()[1] == file.read_bytes()
    save_file({"a": torch.ones(3, 3)}, file)
    with pytest.raises(UserError, match=r"adapter_model\.safetensors was changed while it was read: start again"):
        opened.read_whole()
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"adapter_model\.safetensors is truncated or not a safetensors file"):
        opened.read_whole()


MERGE = r", which an unmerged adapter cannot do: merge it: task=convert convert\.lora=.*adapter"


@each(
    "config, message",
    [
        (
            {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
            r"replaces a bias or a saved module \(lm_head\)",
        ),
        (
            {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
            r"replaces a bias or a saved module \(.*norm\)",
        ),
        ({"target_modules": ["embed_tokens"]}, r"replaces a bias or a saved module \(model\.embed_tokens\)"),
    ],
)
def test_adapters_that_must_be_merged_are_refused(
    base: Path, engine: Engine, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    folder = write_adapter(tmp_path / "adapter", base, LlamaForCausalLM, **config)
    with pytest.raises(UserError, match=message + MERGE):
        read_adapter(folder, engine.executor.model, torch.float32, {})


def test_biases(tmp_path: Path) -> None:
    write_llama(tmp_path / "base", attention_bias=True)
    folder = write_adapter(
        tmp_path / "adapter", tmp_path / "base", LlamaForCausalLM, target_modules=["q_proj"], bias="lora_only"
    )
    with pytest.raises(UserError, match=r"replaces a bias or a saved module \(.*q_proj\)" + MERGE):
        read_adapter(folder, engine_of(tmp_path / "base").executor.model, torch.float32, {})


def test_embeddings_without_their_copy(base: Path, engine: Engine, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", base, LlamaForCausalLM, target_modules=["embed_tokens"])
    change_adapter(folder, {}, {"base_model.model.model.embed_tokens.base_layer.weight": None})
    with pytest.raises(
        UserError, match=r"adapts Embedding, which is not a linear layer \(model\.embed_tokens\)" + MERGE
    ):
        read_adapter(folder, engine.executor.model, torch.float32, {})


def test_a_head_that_is_the_embedding(tmp_path: Path) -> None:
    write_llama(tmp_path / "tied", tie_word_embeddings=True)
    write_llama(tmp_path / "base")
    folder = write_adapter(tmp_path / "adapter", tmp_path / "base", LlamaForCausalLM, target_modules=["lm_head"])
    change_adapter(folder, {}, {"base_model.model.lm_head.base_layer.weight": None})  # PEFT copies the adapted head
    with pytest.raises(UserError, match=r"adapts a head that is tied to the embedding \(lm_head\)" + MERGE):
        read_adapter(folder, engine_of(tmp_path / "tied").executor.model, torch.float32, {})


@each(
    "config, tensors, message",
    [
        ({"use_dora": True}, {}, "use_dora=True is not supported"),
        ({"r": 5}, {}, r"q_proj\.lora_[AB]\.weight is \[.*4.*\], but the model and adapter_config.json need \[.*5.*\]"),
        ({}, {f"{QUERY}.lora_B.weight": None}, r"q_proj\.lora_A\.weight is alone"),
        ({}, {f"{QUERY}.lora_A.weight": torch.full((4, 64), torch.inf)}, "q_proj holds NaN or infinite numbers"),
        ({}, {f"{QUERY}.lora_A.weight": torch.ones(4, 64, dtype=torch.int32)}, r"lora_A\.weight is torch\.int32: LoRA's factors are"),
        ({}, EVERY_TENSOR, "holds no tensors, so it changes nothing: download the adapter again"),
        ({}, {"base_model.model.model.layers.7.mlp.x.lora_A.weight": torch.ones(4, 4)}, "changes model.layers.7.mlp.x, which"),
        ({}, {"stranger": torch.ones(1)}, "stranger is neither a factor of LoRA nor of a module"),
    ],
)  # fmt: skip
def test_damaged_adapters(
    base: Path, engine: Engine, tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    folder = write_adapter(tmp_path / "adapter", base, LlamaForCausalLM, r=4, target_modules=["q_proj"])
    change_adapter(folder, config, tensors)
    with pytest.raises(UserError, match=message):
        read_adapter(folder, engine.executor.model, torch.float32, {})


def test_missing_files(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere has no adapter_config\.json: give the folder of a PEFT adapter"):
        read_adapter(tmp_path / "nowhere", engine.executor.model, torch.float32, {})
