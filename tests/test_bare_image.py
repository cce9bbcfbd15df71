"""GPU runs need only the packages of a CUDA image of PyTorch: an engine of random weights, tests/gpu,
tests/bench/gpu.py."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helpers.fork_server import true_starts

REPOSITORY = Path(__file__).resolve().parent.parent
CARRIED = ("torch", "triton", "transformers", "safetensors", "numpy", "pytest")
UNUSED = {"rich"}  # transformers requires it only for its command line
HIDE = """
import importlib.util
import sys
from importlib.machinery import PathFinder
hidden, find_spec = set(sys.argv.pop(1).split(",")), PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, *rest: None if name.partition(".")[0] in hidden else find_spec(name, *rest)
)
assert not any(importlib.util.find_spec(name) for name in ("gguf", "hydra", "rich", "sentencepiece", "tiktoken"))
"""
GENERATE = """
import json, tempfile
from pathlib import Path
from conf.decoding import DecodeConfig
from conf.quantization import QuantConfig, QuantScheme
from conf.schema import DeviceConfig, DeviceType, DType, ModelConfig, RunConfig, Weights
from pipelines.loading.load_engine import load_engine
from tests.helpers.builders import complete, engine_of, write_llama

with tempfile.TemporaryDirectory() as folder:
    write_llama(Path(folder))
    prompts, decode = [[3, 4, 5], [6]], DecodeConfig(max_new_tokens=5)
    print(*(len(row.token_ids) for row in complete(engine_of(Path(folder)), prompts, decode)))
    for scheme in QuantScheme.none, QuantScheme.int8, QuantScheme.int4:
        model = ModelConfig(folder, dtype=DType.bfloat16, weights=Weights.random, tokenizer=None)
        run = RunConfig(model=model, device=DeviceConfig(DeviceType.cpu), quant=QuantConfig(scheme))
        print(*(len(row.token_ids) for row in complete(load_engine(run, 2), prompts, decode)))
"""
COLLECT = """
import runpy
import pytest
runpy.run_path("tests/bench/gpu.py")
runpy.run_path("tests/bench/tune_gpu.py")
sys.exit(pytest.main(["--collect-only", "-p", "no:cacheprovider", "tests/gpu"]))
"""


def hidden() -> set[str]:
    """Return the top-level modules of installed packages that no package of such an image requires."""
    carried, todo = set(), [canonicalize_name(name) for name in CARRIED]
    while todo:
        name = todo.pop()
        if name not in carried:
            carried.add(name)
            try:
                required = map(Requirement, importlib.metadata.requires(name) or ())
            except importlib.metadata.PackageNotFoundError:  # only on other systems
                continue
            todo += [
                canonicalize_name(requirement.name)
                for requirement in required
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            ]
    modules = importlib.metadata.packages_distributions()
    return UNUSED | {module for module, owners in modules.items() if carried.isdisjoint(map(canonicalize_name, owners))}


@true_starts()
def run_bare(code: str) -> str:
    names = hidden() - {module.stem for module in REPOSITORY.iterdir()}  # ours may be installed too
    assert names.isdisjoint(CARRIED)
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", HIDE + code, ",".join(names)]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_random_weights_become_tokens() -> None:
    assert run_bare(GENERATE).split() == ["5"] * 8


@pytest.mark.long
def test_modules_that_need_a_gpu_can_be_imported() -> None:
    assert "test_tokens_are_the_cpus_with_graphs_and_without" in run_bare(COLLECT)
