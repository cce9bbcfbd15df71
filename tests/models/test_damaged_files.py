"""Any damage to a checkpoint's files ends in one UserError, or in a model: never in another exception, a crash or a
huge allocation."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from conf.errors import UserError
from tests.helpers.builders import engine_of, write_llama
from tests.helpers.cases import each
from tests.helpers.damage import MUTATIONS, mutated
from tests.helpers.small_tokenizers import byte_level, save

FILES = ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
INDEX, PICKLE = "model.safetensors.index.json", "pytorch_model.bin"


@pytest.fixture(scope="module")
def whole_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    tokenizer = byte_level()
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    write_llama(folder, vocab_size=tokenizer.get_vocab_size(), **sizes)
    save(tokenizer, folder)
    (folder / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.7, "top_k": 5, "eos_token_id": [1, 2]}'
    )
    return folder


def load_damaged(whole_folder: Path, folder: Path, name: str, content: bytes) -> None:
    """Load the model of `whole` with this content in the file of this name. It loads, or one line gives the reason."""
    shutil.rmtree(folder, ignore_errors=True)
    with_others_of(whole_folder, folder)
    (folder / name).unlink()
    (folder / name).write_bytes(content)
    message = ""
    try:
        engine_of(folder, batch_size=1, tokenizer="", allow_pickle=True)
    except UserError as error:
        message = str(error)
    assert "\n" not in message


def with_others_of(whole_folder: Path, folder: Path) -> Path:
    """Return `folder` with links to the files of `whole`. Its weights are linked only if `folder` has none."""
    has_weights = folder.exists()
    folder.mkdir(exist_ok=True)
    for file in whole_folder.iterdir():
        if not has_weights or file.suffix != ".safetensors":
            (folder / file.name).symlink_to(file)
    return folder


def load_mutated(whole_folder: Path, folder: Path, name: str, mutations: list[tuple[str, float, int]]) -> None:
    content = (whole_folder / name).read_bytes()
    head = 8 + int.from_bytes(content[:8], "little") if name == "model.safetensors" else len(content)
    load_damaged(whole_folder, folder, name, mutated(content, mutations, head))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), mutations=MUTATIONS)
def test_damage_is_a_user_error(
    whole_folder: Path, tmp_path: Path, name: str, mutations: list[tuple[str, float, int]]
) -> None:
    load_mutated(whole_folder, tmp_path / "damaged", name, mutations)


@pytest.mark.long
@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), mutations=MUTATIONS)
def test_damage_of_1000_files_is_a_user_error(
    whole_folder: Path, tmp_path: Path, name: str, mutations: list[tuple[str, float, int]]
) -> None:
    load_mutated(whole_folder, tmp_path / "damaged", name, mutations)


@pytest.fixture(scope="module")
def in_shards(whole_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same model in two files with an index."""
    folder = tmp_path_factory.mktemp("shards")
    tensors, index = load_file(whole_folder / "model.safetensors"), {}
    for number in range(2):
        names = sorted(tensors)[number::2]
        save_file({name: tensors[name] for name in names}, folder / f"{number}.safetensors")
        index |= dict.fromkeys(names, f"{number}.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return with_others_of(whole_folder, folder)


@pytest.fixture(scope="module")
def pickled(whole_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pickled")
    torch.save(load_file(whole_folder / "model.safetensors"), folder / PICKLE)
    return with_others_of(whole_folder, folder)


@pytest.mark.long
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutations=MUTATIONS)
def test_a_damaged_index_is_a_user_error(
    in_shards: Path, tmp_path: Path, mutations: list[tuple[str, float, int]]
) -> None:
    content = (in_shards / INDEX).read_bytes()
    load_damaged(in_shards, tmp_path / "damaged", INDEX, mutated(content, mutations, len(content)))


@pytest.mark.long
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutations=MUTATIONS)
def test_a_damaged_pickle_is_a_user_error(
    pickled: Path, tmp_path: Path, mutations: list[tuple[str, float, int]]
) -> None:
    content = (pickled / PICKLE).read_bytes()
    load_damaged(pickled, tmp_path / "damaged", PICKLE, mutated(content, mutations, len(content)))


@each(
    "header, message",
    [
        (2**63, "is truncated or not a safetensors file"),
        (10**9, "is truncated or not a safetensors file"),
        (0, "is truncated or not a safetensors file"),
    ],
)
def test_headers_of_absurd_length(whole_folder: Path, tmp_path: Path, header: int, message: str) -> None:
    shutil.copytree(whole_folder, tmp_path / "model")
    content = (whole_folder / "model.safetensors").read_bytes()
    (tmp_path / "model" / "model.safetensors").write_bytes(header.to_bytes(8, "little") + content[8:])
    with pytest.raises(UserError, match=message):
        engine_of(tmp_path / "model")


def test_tensors_that_overlap_are_refused(whole_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(whole_folder, tmp_path / "model")
    content = (whole_folder / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    first, second = [name for name, entry in header.items() if entry.get("shape") == [8]][:2]
    header[second]["data_offsets"] = header[first]["data_offsets"]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(size)[:size]
    (tmp_path / "model" / "model.safetensors").write_bytes(content[:8] + text + content[8 + size :])
    with pytest.raises(UserError, match="is truncated or not a safetensors file"):
        engine_of(tmp_path / "model")
