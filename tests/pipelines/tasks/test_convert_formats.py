"""`task=convert` from any layout into any: a chain through all of them is exact, and adapters are merged as in PEFT."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from transformers import AutoModelForCausalLM

from conf.errors import UserError
from conf.tasks import CheckpointFormat, ConvertConfig, ConvertDType
from models.formats import open_checkpoint
from models.formats.manifest import verify_manifest
from tests.helpers.builders import SHARED, all_logits, engine_of, write_llama
from tests.helpers.cases import each
from tests.helpers.command import run
from tests.helpers.conversion import convert, tensors_in
from tests.helpers.huggingface_files import assert_same
from tests.helpers.merged_adapters import PROMPT, write_adapter

TEXTS = ("Once upon a time 12345", "<s>今天</s> 🙂\n\n  x", "")


def tokenized(path: Path) -> list[list[int]]:
    tokenizer = open_checkpoint(path, allow_pickle=False).load_tokenizer()
    assert tokenizer is not None
    return [tokenizer.encode(text, special) for text in TEXTS for special in (True, False)]


def test_a_chain_through_all_layouts_is_exact(chatty: Path, tmp_path: Path) -> None:
    gguf = convert(chatty, tmp_path / "gguf", format=CheckpointFormat.gguf)
    sharded = convert(gguf, tmp_path / "sharded", format=CheckpointFormat.sharded, tp=2, pp=2)
    again = convert(sharded, tmp_path / "again", format=CheckpointFormat.gguf)
    back = convert(again, tmp_path / "back")
    assert_same(tensors_in(back), tensors_in(chatty))
    assert (gguf / "model.gguf").read_bytes() == (again / "model.gguf").read_bytes()
    for folder in (gguf, sharded, again, back):
        verify_manifest(folder)
        assert tokenized(folder) == tokenized(chatty)
    assert AutoModelForCausalLM.from_pretrained(back).state_dict().keys() >= tensors_in(back).keys()


def test_q8_0_is_the_packages(chatty: Path, tmp_path: Path) -> None:
    tensors = tensors_in(
        convert(
            convert(chatty, tmp_path / "gguf", format=CheckpointFormat.gguf, dtype=ConvertDType.q8_0), tmp_path / "back"
        )
    )
    name = "model.layers.0.mlp.gate_proj.weight"
    codes = quantize(tensors_in(chatty)[name].numpy(), GGMLQuantizationType.Q8_0)
    assert torch.equal(tensors[name], torch.from_numpy(dequantize(codes, GGMLQuantizationType.Q8_0)))


@each("format", CheckpointFormat)
def test_an_adapter_is_merged_into_every_layout(format: CheckpointFormat, tmp_path: Path) -> None:
    base = write_llama(tmp_path / "base")
    expected = write_adapter(tmp_path / "adapter", base, r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    made = convert(tmp_path / "base", tmp_path / "made", format=format, lora=str(tmp_path / "adapter"))
    logits = all_logits(engine_of(made), PROMPT)
    # Float32 sums in other orders.
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4 * expected.abs().max().item())
    with pytest.raises(UserError, match="adapter_config.json"):
        convert(tmp_path / "base", tmp_path / "failed", format=format, lora=str(tmp_path / "nowhere"))
    assert not (tmp_path / "failed").exists()


@each(
    ("settings", "message"),
    [
        (
            {"dtype": ConvertDType.q8_0},
            "convert.dtype=q8_0 is not allowed with convert.format=hf: give .*, or convert.format=gguf",
        ),
        ({"lora": ""}, "convert.lora='' is not allowed: give the folder of an adapter, or null"),
        ({"format": CheckpointFormat.gguf, "tp": 2}, "convert.tp=2 is not used by convert.format=gguf"),
        ({"format": CheckpointFormat.gguf, "max_shard_size": "1GB"}, "is not used by convert.format=gguf"),
    ],
)
def test_contradictions(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ConvertConfig(output="x", **settings)


@pytest.mark.long
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the real models of ../shared")
def test_the_command_line(tmp_path: Path) -> None:
    model = SHARED / "data" / "models" / "stories260K"
    made = run("task=convert", f"model.path={model}", f"convert.output={tmp_path / 'gguf'}", "convert.format=gguf")
    assert made.returncode == 0, made.stderr
    told = run(
        f"model.path={tmp_path / 'gguf'}",
        "model.verify=true",
        "predict.data='Once upon a time'",
        "decode.max_new_tokens=8",
    )
    assert ", there was a l" in told.stdout
