"""Loading valid and invalid checkpoints from folders that the tests write."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from conf.errors import UserError
from conf.schema import DeviceType, DType, Weights
from models.formats import open_checkpoint
from pipelines.loading.load_engine import load_engine
from tests.helpers.cases import each
from tests.helpers.huggingface_files import (
    CONFIG,
    EMBEDDING,
    HIDDEN,
    LAYERS,
    NORM,
    VOCAB,
    Recording,
    assert_same,
    load,
    make_run,
    make_tensors,
    peak_of_loading,
    write_config,
    write_index,
    write_shards,
    write_whole,
)

QUERY = "model.layers.1.self_attn.q_proj.weight"


def split(tensors: dict[str, Tensor], num_shards: int) -> list[dict[str, Tensor]]:
    names = sorted(tensors, key=lambda name: tensors[name].numel())  # so that the shards have similar sizes
    return [{name: tensors[name] for name in names[i::num_shards]} for i in range(num_shards)]


def test_whole_file_loads_every_value(tmp_path: Path) -> None:
    tensors = make_tensors()
    assert_same(load(write_whole(tmp_path, tensors)), tensors)


def test_shards_load_every_value(tmp_path: Path) -> None:
    tensors = make_tensors()
    assert_same(load(write_shards(tmp_path, split(tensors, 3))), tensors)


def test_loaded_values_do_not_depend_on_the_file(tmp_path: Path) -> None:
    tensors = make_tensors()
    parameters = load(write_whole(tmp_path, tensors))
    file = tmp_path / "model.safetensors"
    with open(file, "r+b") as stream:  # in place, so that a mapping would see it
        stream.write(b"\xff" * file.stat().st_size)
    assert_same(parameters, tensors)


@each("head", ["stored twice", "absent"])
def test_tied_head_is_not_needed(tmp_path: Path, head: str) -> None:
    tensors = make_tensors()
    tied = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    copy = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()} if head == "stored twice" else {}
    assert_same(load(write_whole(tmp_path, tied | copy, tie_word_embeddings=True)), tied)


def test_inverse_frequencies_are_left_out(tmp_path: Path) -> None:
    tensors = make_tensors()
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(LAYERS)}
    assert_same(load(write_whole(tmp_path, tensors | extra)), tensors)


def test_checkpoint_saved_without_its_head_lacks_the_trunks_name(tmp_path: Path) -> None:
    tensors = make_tensors()
    del tensors["lm_head.weight"]
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    assert_same(load(write_whole(tmp_path, bare, tie_word_embeddings=True)), tensors)
    with pytest.raises(UserError, match=r"missing: lm_head\.weight$"):
        load(write_whole(tmp_path, bare))
    with pytest.raises(UserError, match=rf"found twice: ({NORM}|norm\.weight)$"):
        load(write_whole(tmp_path, bare | {NORM: tensors[NORM].clone()}, tie_word_embeddings=True))


def test_progress_ends_at_the_size_of_the_model(tmp_path: Path) -> None:
    tensors = make_tensors()
    calls: list[tuple[int, int]] = []
    load_engine(make_run(write_whole(tmp_path, tensors)), 1, Recording(calls))
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert len(calls) == len(tensors)
    assert {total for _, total in calls} == {size}
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert calls[-1][0] == size


def test_keys_that_are_not_used_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(write_whole(tmp_path, make_tensors(), sliding_window=16, eos_token_id=2))
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["sliding_window"]


@each(
    "damage",
    [
        lambda content: content[:-100],
        lambda content: b"",
        lambda content: b"\xff" * 64,
        lambda content: content[:8] + b"?" * 64 + content[72:],
    ],
)
def test_damaged_file_is_refused_by_name(tmp_path: Path, damage: Any) -> None:
    file = write_whole(tmp_path, make_tensors()) / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UserError, match=r"model\.safetensors is truncated or not a safetensors file"):
        load(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no weights: expected model\.safetensors"):
        load(write_config(tmp_path))


@each("name", [QUERY, "lm_head.weight"])
def test_missing_tensor(tmp_path: Path, name: str) -> None:
    tensors = make_tensors()
    del tensors[name]
    with pytest.raises(UserError, match=rf"missing: {name}$"):
        load(write_whole(tmp_path, tensors))


def test_unexpected_tensor(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unexpected: model\.layers\.0\.self_attn\.q_proj\.bias$"):
        load(write_whole(tmp_path, make_tensors() | {"model.layers.0.self_attn.q_proj.bias": torch.ones(HIDDEN)}))


def test_wrong_shape_names_both_shapes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"wrong shape: model\.norm\.weight \[31\], expected \[32\]$"):
        load(write_whole(tmp_path, make_tensors() | {NORM: torch.ones(31)}))


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    tensors = make_tensors()
    with pytest.raises(UserError, match=rf"found twice: {NORM}$"):
        load(write_shards(tmp_path, [tensors, {NORM: tensors[NORM]}]))


def test_all_faults_are_in_one_error(tmp_path: Path) -> None:
    tensors = make_tensors() | {EMBEDDING: torch.ones(VOCAB, 3), "extra.weight": torch.ones(1)}
    del tensors[QUERY], tensors["lm_head.weight"]
    with pytest.raises(UserError, match="does not hold the model") as caught:
        load(write_shards(tmp_path, [tensors, {NORM: tensors[NORM]}]))
    for fault in (f"missing: {QUERY}, lm", "unexpected: extra", f"found twice: {NORM}", f"shape: {EMBEDDING} [64, 3]"):
        assert fault in str(caught.value)


def test_integer_tensors_are_refused(tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors[QUERY] = tensors[QUERY].to(torch.int8)
    with pytest.raises(UserError, match=rf"{QUERY} is torch\.int8, but its layer is not quantised: expected floats"):
        load(write_whole(tmp_path, tensors))


def test_index_names_a_missing_file(tmp_path: Path) -> None:
    folder = write_shards(tmp_path, split(make_tensors(), 2))
    (folder / "shard-1.safetensors").unlink()
    with pytest.raises(UserError, match=r"index\.json names shard-1\.safetensors, which is missing"):
        load(folder)


@each("name", ["../outside.safetensors", "sub/inside.safetensors", "/outside.safetensors", 7])
def test_index_names_no_file_of_its_folder(tmp_path: Path, name: object) -> None:
    for place in (tmp_path, tmp_path / "model" / "sub"):
        place.mkdir(parents=True, exist_ok=True)
        save_file(make_tensors(), place / ("inside.safetensors" if place.name == "sub" else "outside.safetensors"))
    folder = write_index(tmp_path / "model", {"weight_map": {NORM: name}})
    with pytest.raises(UserError, match="is not a file of its own folder"):
        load(folder)


@each(
    "content",
    [
        "{",
        "",
        [],
        {},
        {"weight_map": 3},
        {"weight_map": {"a": [], "b": "c"}},
        "[" * 100_000,
    ],
)
def test_unreadable_index(tmp_path: Path, content: object) -> None:
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json cannot be read"):
        load(write_index(tmp_path, content))


def test_random_weights_are_repeatable_and_need_no_files(tmp_path: Path) -> None:
    write_config(tmp_path)
    first, second = (load(tmp_path, weights=Weights.random) for _ in range(2))
    assert {name: p.shape for name, p in first.items()} == {name: t.shape for name, t in make_tensors().items()}
    assert_same(second, first)
    assert torch.equal(first[NORM], torch.ones(HIDDEN))
    assert first[QUERY].std() == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(first[QUERY], first[QUERY.replace("1", "0")])


@each(
    "config, stored, wanted, expected",
    [
        ({}, "float16", "auto", "float16"),
        ({"torch_dtype": "bfloat16"}, "float32", "auto", "bfloat16"),
        ({"dtype": "bfloat16"}, "float32", "auto", "bfloat16"),
        ({"torch_dtype": "bfloat16"}, "bfloat16", "float32", "float32"),
    ],
)
def test_dtype(tmp_path: Path, config: dict[str, Any], stored: str, wanted: str, expected: str) -> None:
    tensors = {name: tensor.to(getattr(torch, stored)) for name, tensor in make_tensors().items()}
    parameters = load(write_whole(tmp_path, tensors, **config), dtype=DType[wanted])
    assert_same(parameters, {name: tensor.to(getattr(torch, expected)) for name, tensor in tensors.items()})


@each("dtype", ["int8", "float64", ["float32"], 16])
def test_unknown_dtype_is_refused(tmp_path: Path, dtype: object) -> None:
    with pytest.raises(UserError, match=r"dtype .* is not supported: give model\.dtype=float32\|bfloat16\|float16"):
        load(write_whole(tmp_path, make_tensors(), torch_dtype=dtype))


def test_cuda_without_a_gpu_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"device=cuda, but torch sees no CUDA device: give device=cpu"):
        load_engine(make_run(write_whole(tmp_path, make_tensors()), DeviceType.cuda), 1)


def test_max_length_above_the_context_names_both(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.max_length=65 .*max_position_embeddings=64: give at most 64"):
        load(write_whole(tmp_path, make_tensors()), max_length=65)


@pytest.mark.long
def test_peak_memory_is_the_model_and_one_tensor(tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    small.mkdir()
    large.mkdir()
    write_whole(small, make_tensors())
    tensors = make_tensors(56)
    sizes = {name: CONFIG[name] * 56 for name in ("hidden_size", "intermediate_size", "vocab_size")}
    write_whole(large, tensors, **sizes)
    total, largest = (
        sum(tensor.nbytes for tensor in tensors.values()),
        max(tensor.nbytes for tensor in tensors.values()),
    )
    peak = peak_of_loading(small, large)
    # The model, the tensor that is being copied, and as much again that the allocator retains. A loader that keeps the
    # file mapped, or reads everything before it casts, needs two models.
    assert total * 0.9 < peak < total + 2 * largest
    assert largest * 4 < total


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@each(
    ("files", "message"),
    [
        (
            {"config.json": "{}", "model.safetensors": LFS},
            "model.safetensors is a Git LFS pointer, not the file itself",
        ),
        ({"config.json": LFS}, "config.json is a Git LFS pointer"),
        ({"config.json": "{}", "tokenizer.json": LFS}, "tokenizer.json is a Git LFS pointer"),
        ({"config.json": "{}", "quantize_config.json": "{}"}, "has its quantisation only in quantize_config.json"),
        ({"config.json": '{"compression_config": {}}'}, "has compression_config, .*: rename it to quantization_config"),
        (
            {"adapter_config.json": '{"base_model_name_or_path": "org/base"}'},
            "is an adapter of org/base: give org/base as model.path",
        ),
        (
            {"snapshots/abc/config.json": "{}", "refs/main": "abc"},
            "is a folder of the hub's cache: .*model.path=.*snapshots/abc",
        ),
        ({"snapshots/note": ""}, "is a folder of the hub's cache: give the model's id, or download it again"),
        (
            {"config.json": "{}", "x.Q4_K_M.gguf": "GGUF"},
            "holds a config.json and x.Q4_K_M.gguf: give model.path=.*x.Q4_K_M.gguf",
        ),
    ],
)
def test_folders_without_a_checkpoint_are_named(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        open_checkpoint(tmp_path, allow_pickle=False)
