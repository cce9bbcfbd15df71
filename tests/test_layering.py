"""The import rules, enforced: imports go down only, there are no cycles, and some packages are restricted to some
modules. Standard library only."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.helpers.fork_server import true_starts
from tests.helpers.statements import statements

REPOSITORY = Path(__file__).resolve().parent.parent
PIPELINES = [
    f"pipelines.{folder}" for folder in ("engine", "jobs", "ranks", "loading", "replicas", "server", "tasks", "python")
]
FLOORS = ["conf", "kernels", "models", "quantization", *PIPELINES, "pipelines", "run"]  # lowest first
SERVER = [  # packages, each of which uses the ones before it
    "pipelines.replicas.engine_process",
    "pipelines.replicas",
    "pipelines.server.api",
    "pipelines.server.batches",
    "pipelines.server",
]
TORCHLESS = {  # these decide, and compute nothing; the same holds for their imports
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
ALLOWED = {  # third-party package -> modules that may import it; a trailing dot means the whole package
    "hydra": ("run", "conf.compose", "conf.callbacks"),
    "omegaconf": ("run", "conf.compose", "conf.callbacks"),
    "triton": ("kernels.*.triton", "kernels.*.chunks"),
    "transformers": (
        "models.tokenizers.huggingface",
        "models.formats.in_memory",
        "models.tiny.train",
    ),
    "sentencepiece": (
        "models.tokenizers.sentencepiece",
        "models.formats.gguf.tokenizer",
        "models.formats.gguf.vocabulary",
    ),
    "gguf": (
        "models.formats.gguf.file_types",
        "models.formats.gguf.header",
        "models.formats.gguf.imatrix",
        "models.formats.gguf.quantize",
        "models.formats.gguf.tensors",
        "models.formats.gguf.writer",
        "models.formats.gguf.config_writer",
        "models.formats.gguf.decoder_keys",
        "models.formats.gguf.recurrent_keys",
        "models.formats.gguf.output_tensor",
        "models.formats.gguf.special_tokens",
        "models.formats.gguf.stacked",
        "models.formats.gguf.tokenizer",
        "models.formats.gguf.vocabulary",
    ),
    "tokenizers": ("models.tokenizers.*", "models.formats.gguf.*", "models.tiny.train"),
    "jinja2": ("models.tokenizers.templates",),
    "tiktoken": ("models.tokenizers.tiktoken",),
    "huggingface_hub": ("models.formats.hub",),
    "modelscope": ("models.formats.hub",),
    "rich": ("pipelines.jobs.report",),
    "yaml": (
        "conf.compose",
        "models.chat.entries",
        "models.formats.mindspore.config",
        "pipelines.jobs.tracker",
        "pipelines.loading.format_plan",
        "pipelines.loading.topology",
    ),
    "fastapi": ("pipelines.server.*",),
    "starlette": ("pipelines.server.*", "pipelines.server.chat_page"),
    "uvicorn": ("pipelines.server.*",),
    "msgspec": ("pipelines.server.*", "pipelines.replicas.engine_process.*", "pipelines.replicas.messages"),
    "prometheus_client": ("pipelines.server.*",),
    "ray": (
        "pipelines.replicas.connection",
        "pipelines.replicas.workers",
        "pipelines.replicas.row_replicas",
    ),
    "pydantic": ("pipelines.server.api.*", "pipelines.server.*"),
    "llguidance": ("pipelines.engine.guide",),
    "httpx": ("pipelines.server.endpoint",),
    "lm_eval": ("pipelines.lm_eval", "pipelines.tasks.lm_eval"),
    "mlflow": ("pipelines.jobs.tracker",),
    "gradio": ("pipelines.server.chat_page",),
    "matplotlib": (
        "pipelines.loading.quantize.report",
        "pipelines.tasks.evaluate_compare",
        "pipelines.tasks.sweep_picture",
    ),
}


def module_name(file: Path) -> str:
    parts = file.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# modules that talk to another process: kernels, ranks, replicas and the engine's own process; Ray does its own
# communication
TALKING = (
    "kernels.collectives",
    "pipelines.ranks",
    "pipelines.loading.driver",
    "pipelines.loading.model_to_load",
    "pipelines.loading.rank_operations",
    "pipelines.loading.rank_shard",
    "pipelines.loading.rank_worker",
    "pipelines.loading.start_driver",
    "pipelines.loading.worker",
    "pipelines.replicas",
)
MOST_IMPORTS = 15  # of our own modules in a file
TOPS = ("conf", "kernels", "models", "quantization", "pipelines")
FILES = {module_name(file): file for top in TOPS for file in sorted((REPOSITORY / top).rglob("*.py"))} | {
    "run": REPOSITORY / "run.py"
}


@functools.cache
def imports(name: str) -> set[str]:
    """Return the modules that `name` imports, also inside functions; a submodule of ours by its own name."""
    modules = set()
    for node in statements(FILES[name]):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            assert node.module is not None
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= (inside & FILES.keys()) or {node.module}
    return modules


def own_imports(name: str) -> set[str]:
    """Return the modules of ours that `name` imports."""
    return (imports(name) & FILES.keys()) - {name}


def floor(name: str) -> int:
    return FLOORS.index(max((prefix for prefix in FLOORS if f"{name}.".startswith(f"{prefix}.")), key=len))


def top_packages(name: str) -> set[str]:
    return {used.partition(".")[0] for used in imports(name)}


def reached(name: str) -> set[str]:
    """Return our modules that `name` imports, at any depth, and itself."""
    known, todo = set(), {name}
    while todo:
        module = todo.pop()
        known.add(module)
        todo |= (imports(module) & FILES.keys()) - known
    return known


def imports_go_down() -> Iterator[str]:
    for name in FILES:
        for other in imports(name) & FILES.keys():
            if floor(other) > floor(name):
                yield f"{name} imports {other}, which is on a floor above"


def no_cycles() -> Iterator[str]:
    graph, done = {name: imports(name) & FILES.keys() for name in FILES}, set[str]()
    while ready := [name for name in graph if name not in done and graph[name] - {name} <= done]:
        done.update(ready)
    yield from sorted(graph.keys() - done)


def packages_of_the_server_have_an_order() -> Iterator[str]:
    for name in FILES:
        package = name.rpartition(".")[0]
        if package in SERVER:
            later = SERVER[SERVER.index(package) + 1 :]
            yield from (f"{name} imports {other}" for other in imports(name) if other.rpartition(".")[0] in later)


def packages_stay_in_their_places() -> Iterator[str]:
    for name in FILES:
        for package in top_packages(name) & ALLOWED.keys():
            if not any(Path(name).match(pattern) for pattern in ALLOWED[package]):
                yield f"{name} imports {package}"


def ranks_alone_use_torch_distributed() -> Iterator[str]:
    distributed = ("torch.distributed", "torch._C._distributed_c10d")
    users = [name for name in FILES if any(used.startswith(distributed) for used in imports(name))]
    assert users
    yield from (name for name in users if not name.startswith(("kernels.collectives", "pipelines.ranks")))


def nothing_between_processes_is_pickled() -> Iterator[str]:
    names = [name for name in FILES if name.startswith(TALKING)]
    assert names
    yield from (name for name in names if top_packages(name) & {"pickle", "cloudpickle", "multiprocessing"})


def deciding_modules_import_no_torch() -> Iterator[str]:
    for name in TORCHLESS:
        yield from (f"{name} by {module}" for module in reached(name) if "torch" in top_packages(module))


def schema_and_build_need_only_the_standard_library() -> Iterator[str]:
    """`make setup` compiles the kernels while torch is still being installed."""
    for name in ("conf.schema", "conf.errors", "kernels.build"):
        for module in reached(name):
            yield from (f"{module} imports {used}" for used in top_packages(module) - sys.stdlib_module_names - {*TOPS})


def every_package_is_installed() -> Iterator[str]:
    """setuptools finds a folder by its `__init__.py`."""
    folders = {file.parent for top in TOPS for file in (REPOSITORY / top).rglob("*.py")}
    yield from (str(folder) for folder in folders if not (folder / "__init__.py").is_file())


def no_test_module_imports_another() -> Iterator[str]:
    """Shared code is in tests/helpers."""
    for file in sorted((REPOSITORY / "tests").rglob("*.py")):
        for node in statements(file):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if module.startswith("tests.") and module.rpartition(".")[2].startswith(("test_", "conftest")):
                yield f"{file.relative_to(REPOSITORY)} imports {module}"


def only_the_engine_reaches_its_scheduler_and_blocks() -> Iterator[str]:
    """Neither by import nor as an attribute: other packages call methods of Engine."""
    for name in FILES:
        if name.startswith("pipelines.") and not name.startswith("pipelines.engine."):
            code = FILES[name].read_text(encoding="utf-8")
            yield from (f"{name} has {attribute}" for attribute in re.findall(r"\.(?:scheduler|block_manager)\b", code))


def no_file_imports_more_than_a_reader_can_hold() -> Iterator[str]:
    for name in FILES:
        if (count := len(own_imports(name))) > MOST_IMPORTS:
            yield f"{name} imports {count} modules of ours"


RULES: list[Callable[[], Iterator[str]]] = [
    imports_go_down,
    no_cycles,
    packages_of_the_server_have_an_order,
    packages_stay_in_their_places,
    ranks_alone_use_torch_distributed,
    nothing_between_processes_is_pickled,
    deciding_modules_import_no_torch,
    schema_and_build_need_only_the_standard_library,
    every_package_is_installed,
    no_test_module_imports_another,
    only_the_engine_reaches_its_scheduler_and_blocks,
    no_file_imports_more_than_a_reader_can_hold,
]


def test_the_plan_holds() -> None:
    assert len(FILES) > 40
    broken = {rule.__name__: violations for rule in RULES if (violations := list(rule()))}
    assert not broken


@true_starts()
def test_a_start_imports_no_more_than_it_uses() -> None:
    """Each import takes time at every start. Each line is a separate process with the names that it must not import."""
    ours = REPOSITORY / "kernels" / "__init__.py"
    for code, unused in (
        ("import run", "torch transformers"),
        (
            f"import kernels; assert kernels.__file__ == {str(ours)!r}; assert not hasattr(kernels, '__version__')",
            "torch",
        ),
        ("import pipelines.tasks.launch, pipelines.server.app, models.tokenizers", "torch"),
    ):
        check = f"{code}\nimport sys\nsys.exit(', '.join(set({unused!r}.split()) & sys.modules.keys()) or 0)"
        done = subprocess.run([sys.executable, "-c", check], cwd=REPOSITORY, capture_output=True, text=True)
        assert done.returncode == 0, (code, done.stderr)


@true_starts()
def test_a_run_imports_no_more_than_it_uses(tmp_path: Path) -> None:
    """Each of these takes time at every start: torch's compiler, other architectures, and modules that only other
    tasks, tokenizers, terminals and downloads need."""
    code = (
        "import runpy, sys\n"
        f"sys.argv[1:] = ['predict.data=Once', 'decode.max_new_tokens=3', 'quant.kv_cache=int8', 'hydra.run.dir={tmp_path / 'run'}']\n"
        "runpy.run_path('run.py', run_name='__main__')\n"
        "import torch\nfrom kernels.kv_format import FORMATS, allocate\n"
        "caches = [allocate(kind, (1, 16, 2), 64, torch.float32, torch.device('cpu')) for both in FORMATS.values() for kind in both]\n"
        "unused = 'torch._dynamo sympy triton transformers huggingface_hub jinja2 rich matplotlib gguf sentencepiece tiktoken '\n"
        "unused += 'pipelines.tasks.bench pipelines.tasks.evaluate pipelines.tasks.convert pipelines.tasks.quantize '\n"
        "unused += 'pipelines.loading.quantize.model'\n"
        "others = {name for name in sys.modules if name.startswith('models.families.')} - {'models.families.llama'}\n"
        "sys.exit(', '.join(set(unused.split()) & sys.modules.keys() | others) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
