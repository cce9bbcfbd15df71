"""Checkpoints of bitsandbytes' 4-bit weights compared with their definition in plain loops. (Files that bitsandbytes
0.50.2 wrote, NF4 and FP4, with and without double quantisation, gave its own weights to the bit.)"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf.errors import UserError
from tests.helpers.builders import all_logits, engine_of
from tests.helpers.oracle import random_prompts
from tests.helpers.packed_layouts import change, write_twins
from tests.helpers.random_tensors import random

SETTINGS = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "llm_int8_threshold": 6.0,
}
BLOCK, NESTED_BLOCK, OFFSET = 64, 8, 0.03
VALUES = random(16).sort().values / 3
NAME = "model.layers.0.mlp.up_proj.weight"


def state(**values: Any) -> Tensor:
    return torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8)


def encode(weight: Tensor, is_nested: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Return random codes and factors for a weight of this shape, and the weight that they define."""
    count = weight.numel()
    generator = torch.Generator().manual_seed(count)
    codes = torch.randint(16, (count + count % 2,), generator=generator)
    num_blocks = -(-count // BLOCK)
    factors = torch.rand(num_blocks, generator=generator) / 4
    settings: dict[str, Any] = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": "float32", "shape": [*weight.shape]}
    tensors = {
        "weight": (codes[::2] * 16 + codes[1::2]).to(torch.uint8)[:, None],
        "weight.absmax": factors,
        "weight.quant_map": VALUES.clone(),
    }
    if is_nested:
        nested_map, nested = torch.linspace(-0.1, 0.2, 256), torch.rand(-(-num_blocks // NESTED_BLOCK)) + 0.5
        indices = torch.randint(256, (num_blocks,), generator=generator)
        factors = torch.stack([nested_map[j] * nested[i // NESTED_BLOCK] + OFFSET for i, j in enumerate(indices)])
        tensors |= {"weight.absmax": indices.to(torch.uint8)}
        tensors |= {"weight.nested_absmax": nested, "weight.nested_quant_map": nested_map}
        settings |= {"nested_blocksize": NESTED_BLOCK, "nested_offset": OFFSET, "nested_dtype": "float32"}
    tensors["weight.quant_state.bitsandbytes__nf4"] = state(**settings)
    values = torch.stack([VALUES[codes[i]] * factors[i // BLOCK] for i in range(count)])
    return tensors, values.view(weight.shape)


@pytest.mark.long
def test_weights_are_their_definition(tmp_path: Path) -> None:
    for is_nested in (False, True):
        packed, floats = write_twins(
            tmp_path / str(is_nested), SETTINGS, lambda name, weight, nested=is_nested: encode(weight, nested)  # type: ignore[misc]
        )  # fmt: skip
        engine, expected = engine_of(packed), engine_of(floats)
        for prompt in random_prompts(96, (5, 40)):
            assert all_logits(engine, prompt).equal(all_logits(expected, prompt))
    tensors = load_file(packed / "model.safetensors")
    for message, name, tensor in [
        ("has no .*absmax, which bitsandbytes writes", f"{NAME}.absmax", None),
        ("does not fit its absmax", f"{NAME}.nested_absmax", torch.ones(1)),
        ("do not fit its shape", f"{NAME}.quant_map", torch.ones(15)),
        ("is not finite or not torch.float32", f"{NAME}.quant_map", VALUES * torch.nan),
        ("is damaged or has another form", f"{NAME}.quant_state.bitsandbytes__nf4", state(shape=[3])),
        (
            "is damaged or has another form",
            f"{NAME}.quant_state.bitsandbytes__nf4",
            torch.zeros(10**5, dtype=torch.uint8),
        ),
        ("is not finite or not torch.uint8", NAME, tensors[NAME].to(torch.int8)),
    ]:
        change(packed, name, tensor)
        with pytest.raises(UserError, match=message):
            engine_of(packed)
        save_file(tensors, packed / "model.safetensors")
    config = json.loads((packed / "config.json").read_text())
    for message, others in {
        "load_in_8bit=true is not": {"load_in_8bit": True},
        "rank is not known": {"rank": 3},
    }.items():
        changed = config | {"quantization_config": SETTINGS | others}
        (packed / "config.json").write_text(json.dumps(changed))
        with pytest.raises(UserError, match=message):
            engine_of(packed)
