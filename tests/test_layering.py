"""The house plan, enforced: imports go down only, there are no cycles, and some packages stay in their places. Standard library only."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
FLOORS = ["conf", "kernels", "runner", "models", "quantization", "pipelines.engine", "pipelines", "run"]  # lowest first
SERVER = [  # each uses those before it
    "pipelines.engine_process",
    "pipelines.replicas",
    "pipelines.api",
    "pipelines.batches",
    "pipelines.serve",
]
TORCHLESS = {  # these decide, and compute nothing; neither do they import what does
    "conf.schema",
    "conf.decoding",
    "conf.errors",
    "pipelines.engine.adapter_slots",
    "pipelines.engine.request",
    "pipelines.engine.request_factory",
    "pipelines.engine.token_counts",
    "pipelines.engine.detokenizer",
    "pipelines.engine.stopping",
    "pipelines.engine.block_manager",
    "pipelines.engine.scheduler",
}
ALLOWED = {  # third-party package -> modules that may import it; a trailing dot stands for the whole package
    "hydra": ("run", "conf.compose", "conf.callbacks"),
    "omegaconf": ("run", "conf.compose", "conf.callbacks"),
    "triton": ("kernels.*.triton",),
    "transformers": (
        "models.tokenizers.huggingface",
        "models.tiny.train",
    ),
    "sentencepiece": (
        "models.tokenizers.sentencepiece",
        "models.formats.gguf.tokenizer",
        "models.formats.gguf.vocabulary",
    ),
    "gguf": (
        "models.formats.gguf.header",
        "models.formats.gguf.tensors",
        "models.formats.gguf.writer",
        "models.formats.gguf.tokenizer",
        "models.formats.gguf.vocabulary",
    ),
    "tokenizers": ("models.tokenizers.*", "models.formats.gguf.tokenizer", "models.tiny.train"),
    "jinja2": ("models.tokenizers.templates",),
    "tiktoken": ("models.tokenizers.tiktoken",),
    "huggingface_hub": ("models.formats.hub",),
    "rich": ("pipelines.report",),
    "yaml": ("conf.compose", "models.formats.mindspore_config", "pipelines.topology"),
    "fastapi": ("pipelines.serve.*",),
    "starlette": ("pipelines.serve.*", "pipelines.chat_page"),
    "uvicorn": ("pipelines.serve.*",),
    "msgspec": ("pipelines.serve.*", "pipelines.engine_process.*", "pipelines.replicas.messages"),
    "prometheus_client": ("pipelines.serve.*",),
    "ray": (
        "pipelines.replicas.connection",
        "pipelines.replicas.workers",
        "pipelines.replicas.row_replicas",
    ),
    "pydantic": ("pipelines.api.*", "pipelines.serve.*"),
    "llguidance": ("pipelines.engine.guide",),
    "httpx": ("pipelines.endpoint",),
    "lm_eval": ("pipelines.lm_eval",),
    "gradio": ("pipelines.chat_page",),
    "matplotlib": ("pipelines.quantize.report", "pipelines.sweep"),
}


def module_name(file: Path) -> str:
    parts = file.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TOPS = ("conf", "kernels", "models", "quantization", "pipelines", "runner")
FILES = {module_name(file): file for top in TOPS for file in sorted((REPOSITORY / top).rglob("*.py"))} | {
    "run": REPOSITORY / "run.py"
}


@functools.cache
def imports(name: str) -> set[str]:
    """Modules that `name` imports, also inside functions; a submodule by its own name where it is one of ours."""
    found = set()
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            assert node.module is not None
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inside & FILES.keys()) or {node.module}
    return found


def floor(name: str) -> int:
    return max(i for i, prefix in enumerate(FLOORS) if name == prefix or name.startswith(prefix + "."))


def test_every_file_was_found() -> None:
    assert len(FILES) > 40


@pytest.mark.parametrize("name", FILES)
def test_imports_go_down(name: str) -> None:
    upwards = [other for other in imports(name) & FILES.keys() if floor(other) > floor(name)]
    assert not upwards, f"{name} imports from a floor above: {upwards}"


def test_no_cycles() -> None:
    graph = {name: imports(name) & FILES.keys() for name in FILES}
    done: set[str] = set()
    while ready := [name for name in graph if name not in done and graph[name] - {name} <= done]:
        done.update(ready)
    assert done == graph.keys(), f"in or after a cycle: {sorted(graph.keys() - done)}"


@pytest.mark.parametrize("name", [name for name in FILES if name.rpartition(".")[0] in SERVER])
def test_packages_of_the_server_have_an_order(name: str) -> None:
    later = SERVER[SERVER.index(name.rpartition(".")[0]) + 1 :]
    assert not [other for other in imports(name) if other.rpartition(".")[0] in later]


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_stay_in_their_places(package: str) -> None:
    users = {name for name in FILES if any(used.split(".")[0] == package for used in imports(name))}
    wrong = [name for name in users if not any(Path(name).match(pattern) for pattern in ALLOWED[package])]
    assert not wrong, f"{package} is imported by {wrong}"


def test_ranks_alone_use_what_torch_has_for_several_processes() -> None:
    names = ("torch.distributed", "torch._C._distributed_c10d")
    users = {name for name in FILES if any(used.startswith(names) for used in imports(name))}
    assert users
    assert not [name for name in users if not name.startswith(("kernels.collectives", "pipelines.ranks"))]


def test_nothing_between_processes_is_pickled() -> None:
    """What Ray itself sends is Ray's."""
    talking = ("kernels.collectives", "pipelines.ranks", "pipelines.replicas", "pipelines.engine_process")
    names = [name for name in FILES if name.startswith(talking)]
    assert names
    for name in names:
        assert not {used.partition(".")[0] for used in imports(name)} & {"pickle", "cloudpickle", "multiprocessing"}


@pytest.mark.parametrize("name", sorted(TORCHLESS))
def test_what_decides_imports_no_torch(name: str) -> None:
    reached, todo = set(), {name}
    while todo:
        module = todo.pop()
        reached.add(module)
        todo |= (imports(module) & FILES.keys()) - reached
    assert not [module for module in reached if any(used.split(".")[0] == "torch" for used in imports(module))]


def test_schema_needs_only_the_standard_library() -> None:
    for name in ("conf.schema", "conf.errors"):
        assert {used.split(".")[0] for used in imports(name)} <= sys.stdlib_module_names | {"conf"}


def test_importing_the_door_loads_no_torch() -> None:
    code = "import run, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0


def test_the_kernels_package_is_ours() -> None:
    code = "import kernels, sys; print(kernels.__file__); sys.exit(hasattr(kernels, '__version__') or 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0
    assert Path(done.stdout.strip()) == REPOSITORY / "kernels" / "__init__.py"


def test_a_run_imports_no_more_than_it_uses(tmp_path: Path) -> None:
    """Each of these takes time of every start: torch's compiler, other architectures, and what only other tasks, tokenizers, terminals
    and downloads need."""
    code = (
        "import runpy, sys\n"
        f"sys.argv[1:] = ['predict.data=Once', 'decode.max_new_tokens=3', 'hydra.run.dir={tmp_path / 'run'}']\n"
        "runpy.run_path('run.py', run_name='__main__')\n"
        "unused = 'torch._dynamo sympy triton transformers huggingface_hub jinja2 rich matplotlib gguf sentencepiece tiktoken '\n"
        "unused += 'pipelines.bench pipelines.evaluate pipelines.convert pipelines.quantize.quantize'\n"
        "others = {name for name in sys.modules if name.startswith('models.families.')} - {'models.families.llama'}\n"
        "sys.exit(', '.join(set(unused.split()) & sys.modules.keys() | others) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_package_is_installed() -> None:
    """setuptools finds a folder by its `__init__.py`."""
    folders = {file.parent for top in TOPS for file in (REPOSITORY / top).rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]


def test_the_server_may_be_imported_without_torch() -> None:
    code = "import pipelines.launch, pipelines.serve.app, models.tokenizers, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0
