"""MindSpore checkpoints compared with the same weights in Hugging Face's layout."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from conf.errors import UserError
from models.formats import open_checkpoint
from tests.helpers.builders import SMALL, write_llama
from tests.helpers.cases import each
from tests.helpers.mindspore_files import SOUND, ckpt, renamed, write_yaml
from tests.helpers.rank_files import assert_one_tensor_at_a_time, assert_same_model, cut, parameters


@pytest.fixture
def whole_folder(tmp_path: Path) -> Path:
    write_llama(tmp_path / "whole")
    return tmp_path / "whole"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ms").mkdir()
    return tmp_path / "ms"


@each("packed", [False, True])
@each("part", [1001, 2**29])
def test_whole_file(packed: bool, part: int, whole_folder: Path, folder: Path) -> None:
    (folder / "llama.ckpt").write_bytes(ckpt(renamed(load_file(whole_folder / "model.safetensors")), packed, part))
    shutil.copy(whole_folder / "config.json", folder)
    assert_same_model(folder, whole_folder)


def test_several_files_and_yaml(whole_folder: Path, folder: Path) -> None:
    tensors = list(renamed(load_file(whole_folder / "model.safetensors")).items())
    for i in range(3):
        (folder / f"part_{i}.ckpt").write_bytes(ckpt(dict(tensors[i::3])))
    assert_same_model(write_yaml(folder), whole_folder)


@each("num_ranks, num_stages", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_ranks(num_ranks: int, num_stages: int, whole_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ms"
    folder.mkdir()
    for i, tensors in enumerate(cut(load_file(whole_folder / "model.safetensors"), num_ranks, num_stages)):
        (folder / f"rank_{i}").mkdir()
        (folder / f"rank_{i}" / f"llama_rank_{i}-3_2.ckpt").write_bytes(ckpt(renamed(tensors)))
    assert_same_model(write_yaml(folder), whole_folder)


@pytest.mark.long
def test_peak_memory(tmp_path: Path) -> None:
    def write(file: Path, held: dict[str, Tensor]) -> None:
        file.with_suffix(".ckpt").write_bytes(ckpt(renamed(held)))

    # A piece is copied from the mapping, because its bytes are not aligned, and below 32 MB malloc keeps the freed
    # memory of such copies; the packed weight is made while the whole one exists. Measured: 2.2 and 2.7 tensors above a
    # model of 9.5, once 6.1 among other tests.
    assert_one_tensor_at_a_time(tmp_path, write, spare=7)


def test_biases_make_a_qwen2(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "whole").mkdir()
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SMALL)).save_pretrained(tmp_path / "whole")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("bias"):
            tensor.normal_()  # transformers begins with zeros
    save_file(tensors, tmp_path / "whole" / "model.safetensors", {"format": "pt"})
    (folder / "qwen2.ckpt").write_bytes(ckpt(renamed(tensors)))
    assert_same_model(write_yaml(folder, qkv_has_bias=True), tmp_path / "whole")


def test_training_states_are_left_out(whole_folder: Path, folder: Path) -> None:
    weights = renamed(load_file(whole_folder / "model.safetensors"))
    query = "model.layers.0.attention.wq.weight"
    states = [
        f"adam_m.{query}",
        f"adam_v.{query}",
        f"accu_grads.{query}",
        "global_step",
        "epoch_num",
        "step_num",
        "scale_sense",
    ]
    states += ["learning_rate", "beta1_power", "loss_scale", "model.layers.0.attention.paged_attention_mgr.key_cache"]
    states += ["current_iterator_step", "last_overflow_iterator_step", "moment1." + query]
    extra = {name: torch.ones(3, dtype=torch.int8) for name in states}
    (folder / "train.ckpt").write_bytes(ckpt(weights | extra))
    assert_same_model(write_yaml(folder), whole_folder)


def test_unread_settings_are_reported(whole_folder: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "llama.ckpt").write_bytes(ckpt(renamed(load_file(whole_folder / "model.safetensors"))))
    parameters(write_yaml(folder, sliding_window=16, top_k=3))
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["sliding_window, top_k"]


def test_two_checkpoints_of_one_model(whole_folder: Path, folder: Path) -> None:
    for step in (1, 2):
        content = ckpt(renamed(load_file(whole_folder / "model.safetensors")))
        (folder / f"llama-{step}.ckpt").write_bytes(content)
    with pytest.raises(UserError, match=r"found twice: .*model\.embed_tokens\.weight"):
        parameters(write_yaml(folder))


def test_folders_that_are_not_ranks(whole_folder: Path, folder: Path) -> None:
    (folder / "rank_00").mkdir()
    (folder / "rank_00" / "llama.ckpt").write_bytes(SOUND)
    shutil.copy(whole_folder / "config.json", folder)
    with pytest.raises(UserError, match="has no weights"):
        parameters(folder)


def test_a_rank_is_missing(folder: Path) -> None:
    for rank in (0, 2):
        (folder / f"rank_{rank}").mkdir()
        (folder / f"rank_{rank}" / "llama.ckpt").write_bytes(SOUND)
    with pytest.raises(UserError, match=r"rank_1/\*\.ckpt is missing \(found: 0, 2\)"):
        parameters(write_yaml(folder))


def test_two_checkpoints_of_a_rank(whole_folder: Path, folder: Path) -> None:
    (folder / "rank_0").mkdir()
    for step in (1, 2):
        (folder / "rank_0" / f"llama-{step}.ckpt").write_bytes(SOUND)
    with pytest.raises(UserError, match=r"rank_0 has 2 checkpoints \(llama-1\.ckpt, llama-2\.ckpt\): remove the files"):
        parameters(write_yaml(folder))
    (folder / "llama.ckpt").write_bytes(SOUND)
    with pytest.raises(UserError, match=r"has both llama\.ckpt and rank_0/\*\.ckpt"):
        parameters(folder)


def test_tensors_of_other_models_are_unexpected(whole_folder: Path, folder: Path) -> None:
    tensors = renamed(load_file(whole_folder / "model.safetensors")) | {"transformer.embedding.weight": torch.ones(3)}
    (folder / "llama.ckpt").write_bytes(ckpt(tensors))
    with pytest.raises(UserError, match=r"unexpected: transformer\.embedding\.weight$"):
        parameters(write_yaml(folder))


def test_told_by_content(whole_folder: Path, folder: Path) -> None:
    """Other programs name their archives .ckpt, too, and safetensors have precedence."""
    (folder / "other.ckpt").write_bytes(b"PK\x03\x04")
    shutil.copy(whole_folder / "config.json", folder)
    with pytest.raises(UserError, match=r"has no weights: expected model\.safetensors"):
        parameters(folder)
    (whole_folder / "llama.ckpt").write_bytes(SOUND)
    assert parameters(whole_folder).keys() == load_file(whole_folder / "model.safetensors").keys()
    assert open_checkpoint(whole_folder, False).config.raw("model_type") == "llama"
