"""A small Llama in a quantised layout, and its float twin with the weights that the layout defines."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf.decoding import DecodeConfig
from conf.quantization import QuantConfig
from pipelines.engine import Engine
from pipelines.loading.load_engine import load_engine
from tests.helpers.builders import all_logits, complete, engine_of, run_config, write_llama
from tests.helpers.oracle import random_prompts

SIZES = {"hidden_size": 64, "intermediate_size": 96}
Encode = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]
"""From a layer's name and its weight [O, I]: the stored tensors, and the dequantised weight [O, I] float32."""


def write_twins(folder: Path, quantization_config: dict[str, Any], encode: Encode, **config: Any) -> tuple[Path, Path]:
    """Write folders of the quantised model (all linear layers except the head) and of its twin."""
    packed, floats = folder / "packed", folder / "floats"
    write_llama(floats, **{**SIZES, **config})
    plain = load_file(floats / "model.safetensors")
    quantised = {}
    for name, tensor in list(plain.items()):
        if not name.endswith("_proj.weight"):
            quantised[name] = tensor
            continue
        module = name.removesuffix(".weight")
        tensors, plain[name] = encode(module, tensor)
        quantised |= {f"{module}.{tensor_name}": value.contiguous() for tensor_name, value in tensors.items()}
    save_file(plain, floats / "model.safetensors")
    packed.mkdir()
    save_file(quantised, packed / "model.safetensors")
    values = json.loads((floats / "config.json").read_text()) | {"quantization_config": quantization_config}
    (packed / "config.json").write_text(json.dumps(values))
    return packed, floats


def assert_same_model(packed: Path, floats: Path, quant: QuantConfig | None = None) -> None:
    """Compare logits and greedy tokens, and each row alone with its batch. `quant`: of the packed model's run."""
    engine = load_engine(replace(run_config(packed), quant=quant or QuantConfig()), 3)
    expected = engine_of(floats)
    assert engine.executor.weight_bytes < expected.executor.weight_bytes
    prompts = random_prompts(96, (5, 1, 40))
    for prompt in prompts:
        # Kernels may hold 128 inputs of a row in 16 bits: 2^-16 of the largest at every layer, of logits of the order
        # 10.
        torch.testing.assert_close(all_logits(engine, prompt), all_logits(expected, prompt), atol=2e-3, rtol=0)
    tokens = [output.token_ids for output in complete(expected, prompts, DecodeConfig(max_new_tokens=12))]
    assert_rows_are_independent(engine, prompts)
    assert [output.token_ids for output in complete(engine, prompts, DecodeConfig(max_new_tokens=12))] == tokens


def assert_rows_are_independent(engine: Engine, prompts: list[list[int]]) -> None:
    """Compare log probabilities bit for bit."""
    decode = DecodeConfig(max_new_tokens=6, temperature=0, ignore_eos=True, logprobs=0, prefix_cache=False)
    alone = [complete(engine, [prompt], decode)[0] for prompt in prompts]
    assert complete(engine, prompts, decode) == alone


def change(folder: Path, name: str, tensor: Tensor | None) -> None:
    """Replace a tensor of a folder's only file; None removes it."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, file)


def round_half_even(weight: Tensor, group_of: list[int], symmetric: bool, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [O, I] from 0 to 2^bits - 1, zero points [O, G], and float16 scales [O, G] as float32, with one loop
    iteration per group."""
    num_groups, middle = max(group_of) + 1, 2 ** (bits - 1)
    codes = torch.zeros(weight.shape, dtype=torch.int64)
    zeros = torch.full((len(weight), num_groups), middle)
    scales = torch.zeros(len(weight), num_groups)
    for group in range(num_groups):
        columns = [i for i, group_index in enumerate(group_of) if group_index == group]
        part = weight[:, columns].float()
        if symmetric:
            scales[:, group] = (part.abs().amax(1) / (middle - 1)).half().float()
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales[:, group] = ((high - low) / (2 * middle - 1)).half().float()
            zeros[:, group] = (-low / scales[:, group]).round().long()
        ratio = (part / scales[:, group, None]).round().long() + zeros[:, group, None]
        codes[:, columns] = ratio.clamp(0, 2 * middle - 1)
    return codes, zeros, scales


def words(rows: list[list[int]], bits: int, order: list[int]) -> Tensor:
    """Pack unsigned codes [R][C] into int32 [R, C * bits / 32]. The n-th bits of a word, lowest first, hold the code
    order[n]."""
    per_word = 32 // bits
    assert len(order) == per_word
    packed = []
    for row in rows:
        values = []
        for start in range(0, len(row), per_word):
            word = sum(row[start + at] << (bits * n) for n, at in enumerate(order))
            values.append(word - 2**32 if word >= 2**31 else word)
        packed.append(values)
    return torch.tensor(packed, dtype=torch.int32)


def values_of(packed: Tensor, bits: int, order: list[int]) -> list[list[int]]:
    """Return the unsigned codes that `words` packed."""
    per_word, rows = 32 // bits, []
    for row in packed.tolist():
        values = [0] * (len(row) * per_word)
        for w, word in enumerate(row):
            for n, at in enumerate(order):
                values[w * per_word + at] = (word >> (bits * n)) & (2**bits - 1)
        rows.append(values)
    return rows


def dequantised(codes: Tensor, zeros: Tensor, scales: Tensor, group_of: list[int]) -> Tensor:
    weight: Tensor = (codes - zeros[:, group_of]).float() * scales[:, group_of]
    return weight


def groups_of(num_inputs: int, size: int) -> list[int]:
    size = num_inputs if size == -1 else size
    return [i // size for i in range(math.ceil(num_inputs / size) * size)]


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
IN_ORDER = {4: list(range(8)), 8: list(range(4))}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}


def awq_tensors(weight: Tensor, size: int, symmetric: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    group_of = groups_of(weight.shape[1], size)
    codes, zeros, scales = round_half_even(weight, group_of, symmetric, 4)
    tensors = {
        "qweight": words(codes.T.tolist(), 4, AWQ_ORDER),
        "qzeros": words(zeros.T.tolist(), 4, AWQ_ORDER),
        "scales": scales.T.half(),
    }
    return tensors, dequantised(codes, zeros, scales, group_of)


def gptq_tensors(weight: Tensor, config: dict[str, Any], shuffled: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    bits, group_of = config["bits"], groups_of(weight.shape[1], config["group_size"])
    if shuffled:
        order = torch.randperm(len(group_of), generator=torch.Generator().manual_seed(3)).tolist()
        group_of = [group_of[place] for place in order]
    codes, zeros, scales = round_half_even(weight, group_of, config["sym"], bits)
    stored = zeros if config.get("checkpoint_format") == "gptq_v2" else zeros - 1
    assert stored.min() >= 0  # as in AutoGPTQ; a zero point of 0 has a separate test
    tensors = {
        "qweight": words(codes.tolist(), bits, IN_ORDER[bits]).T,
        "qzeros": words(stored.T.tolist(), bits, IN_ORDER[bits]),
        "scales": scales.T.half(),
        "g_idx": torch.tensor(group_of, dtype=torch.int32),
    }
    return tensors, dequantised(codes, zeros, scales, group_of)


AUTOROUND = {
    "provider": "auto-round",
    "autoround_version": "0.16.1",
    "iters": 1000,
    "act_bits": 16,
    "data_type": "int",
    "amp": False,
}
CASES: dict[str, dict[str, Any]] = {
    "awq": AWQ,
    "awq centred": AWQ | {"zero_point": False, "modules_to_not_convert": ["lm_head"]},
    "gptq": GPTQ | {"damp_percent": 0.01, "static_groups": False, "true_sequential": True, "model_name_or_path": None},
    "gptq 8": GPTQ | {"bits": 8, "group_size": -1},
    "gptq asymmetric": GPTQ | {"sym": False},
    "gptq v2": GPTQ | {"sym": False, "checkpoint_format": "gptq_v2", "lm_head": False, "meta": {"quantizer": ["x:1"]}},
    "desc_act": GPTQ | {"desc_act": True},
    "gptq of AutoRound": GPTQ | AUTOROUND,
    "gptq asymmetric, of AutoRound": GPTQ | AUTOROUND | {"sym": False},
    "awq of AutoRound": AWQ | AUTOROUND,
}


def with_any_scales(tensors: dict[str, Tensor], expected: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Make the scales of every third output negative, and the first group's scale of the second output 0."""
    scales, values = tensors["scales"].clone(), expected.clone()
    scales[:, ::3], values[::3] = -scales[:, ::3], -values[::3]
    scales[0, 1], values[1, : values.shape[1] // len(scales)] = 0, 0
    return tensors | {"scales": scales}, values


def write_case(case: str, folder: Path) -> tuple[Path, Path]:
    """Write a packed Llama and its float twin."""
    config = CASES[case]

    def encode(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        if config["quant_method"] == "awq":
            tensors, expected = awq_tensors(weight, 32, not config["zero_point"])
        else:
            tensors, expected = gptq_tensors(weight, config, shuffled=config["desc_act"])
        return with_any_scales(tensors, expected) if "provider" in config else (tensors, expected)

    return write_twins(folder, config, encode)
