"""Experts in three-dimensional tensors, in both orders, compared with transformers' whole model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf.errors import UserError
from models.formats.wrapper import text_config
from tests.helpers.builders import engine_of, run_config
from tests.helpers.cases import each
from tests.helpers.catalog import ROWS
from tests.helpers.conversion import SHARDED, convert, tensors_in
from tests.helpers.divided import assert_same_bits, divided_steps, whole_steps
from tests.helpers.oracle import random_prompts, write_random
from tests.helpers.wrapped_models import assert_equal, change, reference_of

GATE_UP = "model.language_model.layers.1.mlp.experts.gate_up_proj"
DOWN = "model.language_model.layers.1.mlp.experts.down_proj"


def change_experts(folder: Path, changed: Callable[[str, Tensor], Tensor]) -> None:
    file = folder / "model.safetensors"
    tensors = {
        name: changed(name, tensor).contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file)


def turn(folder: Path) -> None:
    """Return the tensor as checkpoints of the hub have it: inputs before outputs."""
    change_experts(folder, lambda _, tensor: tensor.mT)


@each(
    "channels, is_turned",  # fused gates and ups, separate ones, or square downs, of 48 hidden channels
    [(channels, is_turned) for channels in (24, 32, 48) for is_turned in (False, True)],
    quick=[(32, True)],
)
def test_equals_transformers(channels: int, is_turned: bool, tmp_path: Path) -> None:
    reference = write_random(tmp_path, reference_of("qwen3_vl_moe", moe_intermediate_size=channels))
    if is_turned:
        turn(tmp_path)
    assert_equal(tmp_path, reference)


def test_the_sibling_of_a_square_tensor_may_be_in_another_file(tmp_path: Path) -> None:
    reference = write_random(tmp_path, reference_of("qwen3_vl_moe", moe_intermediate_size=24))
    turn(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = {name: f"model-{int('gate_up' in name)}.safetensors" for name in tensors}
    for file in sorted(set(names.values())):
        save_file({name: tensor for name, tensor in tensors.items() if names[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {str(names).replace(chr(39), chr(34))}}}')
    assert_equal(tmp_path, reference)


@each("tp", [2, 3])
def test_ranks_have_the_bits_of_one_process(tp: int, tmp_path: Path) -> None:
    write_random(tmp_path, reference_of("qwen3_vl_moe", moe_intermediate_size=40))
    turn(tmp_path)
    run, prompts = run_config(tmp_path), random_prompts(96, (5, 1, 20))
    assert_same_bits(whole_steps(run, prompts), divided_steps(run, tp, prompts))


@pytest.mark.long
@each("settings", [{}, {"format": SHARDED, "tp": 2}])
def test_converted_experts_have_a_matrix_for_each_layer(settings: dict[str, Any], tmp_path: Path) -> None:
    reference = write_random(tmp_path / "joined", reference_of("qwen3_vl_moe"))
    turn(tmp_path / "joined")
    apart = convert(tmp_path / "joined", tmp_path / "apart", **settings)
    assert "model.layers.1.mlp.experts.5.up_proj.weight" in tensors_in(apart)
    assert_equal(apart, reference)


@each(
    "changed, message",
    [
        (
            lambda name, x: x[:, :, :31] if name == DOWN else x,
            r"unexpected: model\.layers\.1\.mlp\.experts\.down_proj$",
        ),
        (
            lambda name, x: x.mT if name == DOWN else x,
            r"unexpected: model\.layers\.1\.mlp\.experts\.(down|gate_up)_proj",
        ),
        (
            lambda name, x: x[:5] if name == DOWN else x,
            r"missing: model\.layers\.1\.mlp\.experts\.5\.down_proj\.weight$",
        ),
        (
            lambda name, x: torch.cat([x, x[:1]]) if name == DOWN else x,
            r"unexpected: model\.layers\.1\.mlp\.experts\.6\.down_proj\.weight$",
        ),
        (lambda name, x: x[0] if name == GATE_UP else x, r"unexpected: model\.layers\.1\.mlp\.experts\.gate_up_proj"),
        (lambda name, x: x[0, 0, 0] if name == GATE_UP else x, r"model\.layers\.1\.mlp\.experts\.gate_up_proj"),
    ],
)
def test_damaged_experts_are_named(changed: Callable[[str, Tensor], Tensor], message: str, tmp_path: Path) -> None:
    write_random(tmp_path, reference_of("qwen3_vl_moe"))
    change_experts(tmp_path, changed)
    with pytest.raises(UserError, match=message):
        engine_of(tmp_path)


@each("family", ["gpt_oss", "llama4_text"])
def test_another_order_than_the_family_declares_is_refused(family: str, tmp_path: Path) -> None:
    row = ROWS[family]
    row.write(tmp_path, **row.variants[0])
    change_experts(tmp_path, lambda name, x: x if name.endswith("bias") else x.mT)
    with pytest.raises(UserError, match=r"unexpected: model\.layers\.\d\.\w+\.experts\.down_proj"):
        engine_of(tmp_path)


@each("is_beside", [False, True])
def test_an_expert_that_is_also_there_alone(is_beside: bool, tmp_path: Path) -> None:
    write_random(tmp_path, reference_of("qwen3_vl_moe"))
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    twice = {GATE_UP.replace("gate_up_proj", "3.up_proj.weight"): tensors[GATE_UP][3].chunk(2)[1].clone()}
    files = {"a.safetensors": tensors, "b.safetensors": twice} if is_beside else {"a.safetensors": tensors | twice}
    for file, held in files.items():
        save_file(held, tmp_path / file)
    names = {name: file for file, held in files.items() for name in held}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    message = r"holds model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight in .*\.gate_up_proj, but .* also has it as a tensor of its own"
    with pytest.raises(UserError, match=message):
        engine_of(tmp_path)


def test_pickles_are_refused(tmp_path: Path) -> None:
    write_random(tmp_path, reference_of("qwen3_vl_moe"))
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(
        UserError, match=r"pytorch_model\.bin joins experts in one tensor, .* convert it to safetensors"
    ):
        engine_of(tmp_path, allow_pickle=True)


def test_weights_of_experts_always_add_up_to_1(tmp_path: Path) -> None:
    """Other files of Qwen 3's mixtures have a key for it; this family's code does not read it."""
    write_random(tmp_path, reference_of("qwen3_vl_moe"))
    change(tmp_path, norm_topk_prob=False)
    with pytest.raises(UserError, match="norm_topk_prob=False is not supported: only True, None"):
        engine_of(tmp_path)
    assert text_config({"model_type": "qwen3_vl_moe", "text_config": {}}, "x").raw("norm_topk_prob") is True
