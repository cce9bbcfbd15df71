"""Soft prefix files that are damaged, belong to another model, or are used with unsupported models."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from conf.errors import UserError
from models.formats.prefix import read_prefix
from pipelines.loading.model_source import resolve_model
from pipelines.loading.planning import plan_model
from tests.helpers.builders import run_config, write_llama
from tests.helpers.cases import each
from tests.helpers.catalog import link
from tests.helpers.deepseek import V3_GROUPS, build
from tests.helpers.oracle import write_model
from tests.helpers.soft_prefixes import write_paddle
from tests.helpers.written_models import write_written


def read(model: Path, path: Path) -> Any:
    run = run_config(model, allow_pickle=True)
    plan = plan_model(run.model, run.quant, resolve_model(run.model), torch.device("cpu"), packed=False)
    return read_prefix(path, plan.model, str(plan.source.checkpoint.config.raw("model_type")))


def write_adapter(folder: Path, values: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    settings = {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3, **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(values, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    return folder


@each("dtype", ["float16", "float32", "float64", ">f4"])
def test_pre_caches_of_any_float_are_read(llama: Path, tmp_path: Path, dtype: str) -> None:
    values = write_paddle(tmp_path / "pre_caches.npy", 3).numpy().astype(dtype)
    np.save(tmp_path / "pre_caches.npy", values)
    prefix = read(llama, tmp_path)
    assert (prefix.num_tokens, prefix.first_position, len(prefix.layers)) == (3, 0, 2)
    for number, layer in enumerate(prefix.layers):
        for which, vectors in enumerate(layer):  # [P, G, D]
            assert torch.equal(
                vectors.float(), torch.from_numpy(values[number, which].astype(np.float32)).transpose(0, 1)
            )


@each(
    "array, message",
    [
        (
            np.zeros((2, 2, 4, 3, 16), np.float32),
            r"is \[2, 2, 4, 3, 16\], but the model needs \[L, 2, G, P, D\] = \[2, 2, 2, 3, 16\] \(L=2, G=2, D=16\)",
        ),
        (np.zeros((2, 2, 2, 0, 16), np.float32), r"is \[2, 2, 2, 0, 16\], but the model .* = \[2, 2, 2, 1, 16\]"),
        (np.zeros(7, np.float32), r"is \[7\], but the model needs"),
        (np.zeros((2, 2, 2, 3, 16), np.int32), "holds int32: give an array of float16, float32 or float64"),
        (np.zeros((2, 2, 2, 3, 16), np.complex64), "holds complex64: give"),
        (np.full((2, 2, 2, 3, 16), np.nan, np.float32), "holds NaN or infinite numbers"),
        (np.array([{}], dtype=object), r"is damaged or not a numpy array \(ValueError: .*Python objects"),
    ],
)
def test_wrong_arrays_are_refused(llama: Path, tmp_path: Path, array: Any, message: str) -> None:
    np.save(tmp_path / "pre_caches.npy", array, allow_pickle=True)
    with pytest.raises(UserError, match=message):
        read(llama, tmp_path)


def test_damaged_files_are_refused(llama: Path, tmp_path: Path) -> None:
    write_paddle(tmp_path / "whole.npy", 3)
    (tmp_path / "cut.npy").write_bytes((tmp_path / "whole.npy").read_bytes()[:-5])
    (tmp_path / "text.npy").write_text("no array")
    (tmp_path / "empty.npy").write_bytes(b"")
    np.savez(tmp_path / "several.npz", a=np.zeros(3))
    for name in ("cut.npy", "text.npy", "empty.npy", "several.npz"):
        with pytest.raises(UserError, match=f"{name} is damaged or not a numpy array"):
            read(llama, tmp_path / name)
    with pytest.raises(
        UserError, match="holds no prefix: give a pre_caches.npy, or a folder with pre_caches.npy or adapter_config"
    ):
        read(llama, tmp_path)


@each(
    "header, message",
    [
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2, 2, 1099511627776, 16)}", "mmap length is greater"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (1180591620717411303424,)}", "OverflowError"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (2, -2, 2, 3, 16)}", "must be positive"),
        ("{'descr': '<f16', 'fortran_order': False, 'shape': (3,)}", "holds float128: give"),
        ("(" * 5000, "TokenError"),
        ("__import__('os').abort()", "Cannot parse header|malformed"),
    ],
)
def test_headers_that_lie_are_refused_before_memory_is_taken(
    llama: Path, tmp_path: Path, header: str, message: str
) -> None:
    length = len(header).to_bytes(2, "little")
    (tmp_path / "p.npy").write_bytes(b"\x93NUMPY\x01\x00" + length + header.encode() + bytes(64))
    with pytest.raises(UserError, match=message):
        read(llama, tmp_path / "p.npy")


WHOLE = {"prompt_embeddings": torch.zeros(3, 2 * 2 * 2 * 16)}


@each(
    "values, config, message",
    [
        (WHOLE, {"peft_type": "LORA"}, "peft_type='LORA' is not supported: only 'PREFIX_TUNING', 'PROMPT_TUNING'"),
        (WHOLE, {"num_transformer_submodules": 2}, "num_transformer_submodules=2 is not supported"),
        (WHOLE, {"num_virtual_tokens": 4}, "has 3 virtual tokens, but adapter_config.json num_virtual_tokens=4"),
        (
            {"prompt_embeddings": torch.zeros(3, 64)},
            {},
            r"is \[3, 64\], but the model needs \[P, L \* 2 \* G \* D\] = \[3, 128\] \(L=2, G=2, D=16\)",
        ),
        (
            {"prompt_embeddings": torch.zeros(3, 48)},
            {"peft_type": "P_TUNING"},
            r"is \[3, 48\], but the model's embeddings need \[P, E\] = \[3, 64\]",
        ),
        ({"other": torch.zeros(3, 64)}, {}, "holds other: give one float tensor prompt_embeddings"),
        ({"prompt_embeddings": torch.zeros(3, 128).long()}, {}, "give one float tensor"),
        ({"prompt_embeddings": torch.full((3, 128), torch.inf)}, {}, "holds NaN or infinite numbers"),
    ],
)
def test_wrong_adapters_are_refused(
    llama: Path, tmp_path: Path, values: dict[str, torch.Tensor], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read(llama, write_adapter(tmp_path / "p", values, **config))


def test_an_adapter_without_safetensors_is_refused(llama: Path, tmp_path: Path) -> None:
    (write_adapter(tmp_path / "p", WHOLE) / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match="has no adapter_model.safetensors: save the adapter as safetensors"):
        read(llama, tmp_path / "p")


@each(
    "write, size, reason",
    [
        (
            lambda folder: build(3, **V3_GROUPS).save_pretrained(folder),
            None,
            "which caches latents instead of keys and values",
        ),
        (
            lambda folder: write_model(folder, transformers.MistralForCausalLM, sliding_window=20),
            (2, 2, 16),
            "whose sliding windows would lose the prefix",
        ),
        (lambda folder: link("gemma2", folder), None, "whose sliding windows would lose the prefix"),
        (
            lambda folder: write_llama(folder, rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
            (2, 2, 16),
            "whose keys depend on the length of the text",
        ),
    ],
)
def test_models_that_take_no_prefix_are_named(
    tmp_path: Path, write: Any, size: tuple[int, int, int] | None, reason: str
) -> None:
    (tmp_path / "model").mkdir()
    write(tmp_path / "model")
    run = run_config(tmp_path / "model", allow_pickle=True)
    heads = open_heads(run)
    write_paddle(tmp_path / "p.npy", 3, *(size or heads))
    with pytest.raises(
        UserError, match=rf"p.npy is not possible with model_type=\w+, {reason}.*: leave the prefix out"
    ):
        read(tmp_path / "model", tmp_path / "p.npy")


@each(
    "family, kind, reason",
    [
        (
            "chatglm",
            "PREFIX_TUNING",
            "whose prompts begin at position 0 after a prefix, which PEFT's",
        ),
        ("chatglm", "PROMPT_TUNING", "whose prompts begin at position 0 after a prefix"),
        ("qwen", "PROMPT_TUNING", "whose keys depend on the length of the text"),
    ],
)
def test_models_that_take_no_prefix_of_peft_are_named(tmp_path: Path, family: str, kind: str, reason: str) -> None:
    (tmp_path / "model").mkdir()
    write_written(tmp_path / "model", family)
    width = 64 if kind == "PROMPT_TUNING" else 2 * 2 * 64
    write_adapter(tmp_path / "p", {"prompt_embeddings": torch.zeros(3, width)}, peft_type=kind)
    with pytest.raises(UserError, match=rf"is not possible with model_type=\w+, {reason}.*: leave the prefix out"):
        read(tmp_path / "model", tmp_path / "p")


def open_heads(run: Any) -> tuple[int, int, int]:
    heads = plan_model(
        run.model, run.quant, resolve_model(run.model), torch.device("cpu"), packed=False
    ).model.attention_heads
    return len(heads), heads[0].num_key_value_heads, heads[0].head_dim
