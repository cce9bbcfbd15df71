"""Reading a file in another dtype."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from models.formats.huggingface import SafetensorsFile
from models.weights import CastFile, match_tensors
from tests.models.formats.test_partition import DEEPSEEK, build


def test_cast_is_what_every_model_of_that_dtype_holds(tmp_path: Path) -> None:
    model = build(DEEPSEEK)
    tensors = {name: torch.randn(parameter.shape) for name, parameter in model.named_parameters()}
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(4)}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    file = SafetensorsFile(tmp_path / "model.safetensors")
    cast = CastFile(file, model, match_tensors(model, [file], ("inv_freq",)), torch.bfloat16)
    kept = {name for name, dtype in cast.dtypes.items() if dtype == torch.float32}
    router = {f"model.layers.1.mlp.gate.{name}" for name in ("weight", "e_score_correction_bias")}
    assert kept == router | extra.keys()  # as loading keeps the router
    for name, tensor in cast.read(file.shapes):
        assert tensor.dtype == cast.dtypes[name]
        assert torch.equal(tensor, (tensors | extra)[name].to(tensor.dtype))
