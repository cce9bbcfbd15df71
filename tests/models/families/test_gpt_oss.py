"""gpt-oss's files with experts in MXFP4, compared with transformers' model of the same numbers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conf.errors import UserError
from kernels.linear.block_weight import BlockWeight
from models.layers.moe import Experts
from tests.helpers.builders import all_logits, engine_of, run_config
from tests.helpers.divided import assert_same_bits, divided_steps, whole_steps
from tests.helpers.mxfp4_files import set_quantization, write_mxfp4
from tests.helpers.oracle import random_prompts

ROUNDED = 2e-3  # of logits: activations become 16-bit fixed point, as in tests/quantization/test_layouts_gguf.py


def move_scales(folder: Path) -> None:
    """Move the scales to another file, in which large checkpoints may have them."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{int(name.endswith('_scales'))}.safetensors" for name in tensors}
    for file in sorted(set(files.values())):
        save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


@torch.inference_mode()
def test_mxfp4_equals_transformers_and_ranks_have_the_bits_of_one_process(tmp_path: Path) -> None:
    reference, prompts = write_mxfp4(tmp_path), random_prompts(96, (5, 1, 20))
    move_scales(tmp_path)
    engine = engine_of(tmp_path, block_activations="none")
    for prompt in prompts:
        torch.testing.assert_close(
            all_logits(engine, prompt), reference(torch.tensor([prompt])).logits[0], atol=ROUNDED, rtol=0
        )
    experts = [module for module in engine.executor.model.modules() if isinstance(module, Experts)]
    assert len(experts) == 2
    for module in experts:
        assert module.is_merged
        weights = [part.method.weight for part in module[0].parts]
        assert all(isinstance(weight, BlockWeight) and weight.kind == "MXFP4" for weight in weights)
    run = run_config(tmp_path)  # activations are rounded, as in GGUF files
    assert_same_bits(whole_steps(run, prompts), divided_steps(run, 2, prompts))


def test_damaged_mxfp4_is_named(tmp_path: Path) -> None:
    write_mxfp4(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.experts.down_proj_scales"
    tensors = load_file(file)
    tensors[name][2, 5, 1] = 255
    save_file(tensors, file)
    with pytest.raises(
        UserError, match=r"layers\.1\.mlp\.experts\.2\.down_proj: weight_scale has values that are not num"
    ):
        engine_of(tmp_path)
    tensors[name][2, 5, 1] = 120
    sinks = "model.layers.1.self_attn.sinks"
    for changed, message in (
        (
            {name: tensors[name][:, :, :2].contiguous()},
            r"unexpected: .*layers\.1\.mlp\.experts\.down_proj_(blocks|scales)",
        ),
        ({sinks: tensors[sinks][:3].clone()}, r"layers\.1\.self_attn\.sinks \[3\], expected \[4\]"),
    ):
        save_file(tensors | changed, file)
        with pytest.raises(UserError, match=message):
            engine_of(tmp_path)
    set_quantization(tmp_path, quant_method="mxfp4", block=16)
    with pytest.raises(UserError, match="quantization_config: block is not known for quant_method='mxfp4'"):
        engine_of(tmp_path)
