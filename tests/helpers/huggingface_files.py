"""Small Llama checkpoints in Hugging Face's layout, and the results of loading them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from conf.schema import DeviceConfig, DeviceType, ModelConfig, RunConfig
from conf.tasks import PredictConfig
from pipelines.jobs.report import NoProgress
from pipelines.loading.load_engine import load_engine
from tests.helpers.builders import weights_of
from tests.helpers.fork_server import true_starts

HIDDEN, FEED_FORWARD, VOCAB, LAYERS, CONTEXT = 32, 48, 64, 2, 64
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FEED_FORWARD,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
}
NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"


class Recording(NoProgress):
    def __init__(self, calls: list[tuple[int, int]]) -> None:
        self._calls = calls

    def loaded(self, done: int, total: int) -> None:
        self._calls.append((done, total))


def make_tensors(scale: int = 1) -> dict[str, Tensor]:
    """Return all tensors of CONFIG's model, with the names and shapes of Llama checkpoints."""
    hidden, wide, vocab = HIDDEN * scale, FEED_FORWARD * scale, VOCAB * scale
    shapes = {EMBEDDING: (vocab, hidden), NORM: (hidden,), "lm_head.weight": (vocab, hidden)}
    for i in range(LAYERS):
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{i}.{name}.weight"] = (hidden,)
        for name, rows in (("q", hidden), ("k", hidden // 2), ("v", hidden // 2), ("o", hidden)):
            shapes[f"model.layers.{i}.self_attn.{name}_proj.weight"] = (rows, hidden)
        for name, shape in (("gate", (wide, hidden)), ("up", (wide, hidden)), ("down", (hidden, wide))):
            shapes[f"model.layers.{i}.mlp.{name}_proj.weight"] = shape
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write_config(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


def write_whole(folder: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return write_config(folder, **changes)


def write_index(folder: Path, content: object, **changes: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "model.safetensors.index.json").write_text(text)
    return write_config(folder, **changes)


def write_shards(folder: Path, shards: list[dict[str, Tensor]], **changes: Any) -> Path:
    weight_map = {}
    for i, tensors in enumerate(shards):
        save_file(tensors, folder / f"shard-{i}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"shard-{i}.safetensors")
    return write_index(folder, {"weight_map": weight_map}, **changes)


def make_run(folder: Path, device: DeviceType = DeviceType.cpu, **model: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(path=str(folder), tokenizer=None, **model),
        device=DeviceConfig(device),
        predict=PredictConfig(batch_size=1),
    )


def load(folder: Path, **model: Any) -> dict[str, Tensor]:
    """Return the parameters of the model that a run loads."""
    return weights_of(load_engine(make_run(folder, **model), 1).executor.model)


def assert_same(parameters: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert parameters.keys() == expected.keys()
    for name, tensor in expected.items():
        assert parameters[name].dtype == tensor.dtype, name
        assert torch.equal(parameters[name], tensor), name


# A forked process inherits the peak of its parent. The small process in between resets it.
START = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
MEASURE = """
import resource, sys
from conf.schema import DeviceConfig, DeviceType, ModelConfig, RunConfig
from pipelines.loading.load_engine import load_engine

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
def load(folder):
    model, device = ModelConfig(path=folder, tokenizer=None, allow_pickle=True), DeviceConfig(DeviceType.cpu)
    return load_engine(RunConfig(model=model, device=device), 1)

load(sys.argv[1])  # so that what the libraries take at their first use is not counted
before, engine = peak(), load(sys.argv[2])
print(peak() - before)
"""


@true_starts()
def peak_of_loading(small: Path, large: Path) -> int:
    """Return how many bytes the peak of loading a large model exceeds the peak of loading a small one.

    Deletes the large model, because folders of past tests are kept for a while.
    """
    command = [sys.executable, "-c", START, sys.executable, "-c", MEASURE, str(small), str(large)]
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    peak = int(subprocess.run(command, env=os.environ | path, stdout=subprocess.PIPE, check=True).stdout)
    shutil.rmtree(large)
    return peak
