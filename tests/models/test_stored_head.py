"""A config that ties the head to the embedding, with files that contain a head: like transformers 5 we use a head that
differs."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
)

from conf.quantization import QuantConfig, QuantScheme
from conf.tasks import CheckpointFormat
from pipelines.loading.load_engine import load_engine
from tests.helpers.builders import all_logits, engine_of, run_config
from tests.helpers.cases import each
from tests.helpers.conversion import convert
from tests.helpers.oracle import TOLERANCE
from tests.helpers.stored_head import TIED_MODELS, tied

PROMPT = [5, 6, 7, 8]
WARNING = "ties the head to the embedding, but the files hold a different lm_head.weight: the stored head is used"


@each("name", TIED_MODELS)
def test_a_head_that_differs_is_used_as_in_transformers(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logits = {}
    for scale in (1.0, 1.5):
        caplog.clear()
        folder = tied(tmp_path / str(scale), name, scale)
        logits[scale] = all_logits(engine_of(folder), PROMPT)
        assert len([message for message in caplog.messages if WARNING in message]) == (scale != 1)
        with torch.no_grad():
            expected = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([PROMPT])).logits[0]
        torch.testing.assert_close(logits[scale], expected, atol=TOLERANCE, rtol=0)
    assert not torch.allclose(logits[1.0], logits[1.5])


@each("name", TIED_MODELS)
def test_a_head_without_an_embedding_is_both(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As transformers loads it."""
    folder = tied(tmp_path / "source", name, scale=1.0)
    expected = all_logits(engine_of(folder), PROMPT)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["lm_head.weight"]
    others = {
        name: tensor for name, tensor in tensors.items() if name == "lm_head.weight" or not torch.equal(tensor, head)
    }
    assert len(others) == len(tensors) - 1
    save_file(others, folder / "model.safetensors", {"format": "pt"})
    assert torch.equal(all_logits(engine_of(folder), PROMPT), expected)
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(expected, plain, atol=TOLERANCE, rtol=0)
    assert torch.equal(all_logits(engine_of(convert(folder, tmp_path / "copy")), PROMPT), expected)
    assert not [message for message in caplog.messages if WARNING in message]


def test_it_is_kept_in_every_layout(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The written config ties nothing, so the model loads without a warning."""
    folder = tied(tmp_path / "source")
    expected = all_logits(engine_of(folder), PROMPT)
    for format, parallel_layout in (
        (CheckpointFormat.hf, {}),
        (CheckpointFormat.sharded, {"tp": 2, "pp": 2}),
        (CheckpointFormat.gguf, {}),
    ):
        made = convert(folder, tmp_path / format.name, format=format, **parallel_layout)
        caplog.clear()
        assert torch.equal(all_logits(engine_of(made), PROMPT), expected)
        assert not caplog.messages


def test_it_is_found_in_the_files_of_ranks_and_in_pickles(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tied(tmp_path / "hf")
    expected = all_logits(engine_of(folder), PROMPT)
    tensors = load_file(folder / "model.safetensors")
    ranks, pickled = tmp_path / "ranks", tmp_path / "pickled"
    for made in (ranks, pickled):
        made.mkdir()
        shutil.copyfile(folder / "config.json", made / "config.json")
    torch.save(tensors, pickled / "pytorch_model.bin")
    for rank in range(2):
        cut = {
            name: tensor.chunk(2, dim=1 if name.split(".")[-2] in ("o_proj", "down_proj") else 0)[rank].contiguous()
            if tensor.ndim == 2
            else tensor
            for name, tensor in tensors.items()
        }
        save_file(cut, ranks / f"model-rank-{rank}-part-0.safetensors", {"format": "pt"})
    for made in (ranks, pickled):
        caplog.clear()
        assert torch.equal(all_logits(engine_of(made, allow_pickle=True), PROMPT), expected)
        assert len([message for message in caplog.messages if WARNING in message]) == 1


def test_it_is_quantised_as_a_head_of_its_own(tmp_path: Path) -> None:
    folder = tied(tmp_path / "hf")
    untied = tmp_path / "untied"
    shutil.copytree(folder, untied)
    config = (untied / "config.json").read_text()
    (untied / "config.json").write_text(config.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    run = replace(run_config(folder), quant=QuantConfig(QuantScheme.int8))
    other = replace(run_config(untied), quant=QuantConfig(QuantScheme.int8))
    one, two = (all_logits(load_engine(config, 1), PROMPT) for config in (run, other))
    assert torch.equal(one, two)
