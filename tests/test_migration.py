"""The commands of MIGRATION.md: what it recommends instead of another tool's option is a command that works."""

import json
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from transformers import LlamaForCausalLM

from conf.former import SECTIONS
from tests.helpers.adapters import write_adapter
from tests.helpers.builders import REPOSITORY
from tests.helpers.command import run
from tests.helpers.server import ended, served
from tests.helpers.soft_prefixes import write_paddle

TINY = REPOSITORY / "models" / "tiny"
ABSENT = {
    "device=cuda": "a GPU",
    "device.cuda_graphs": "a GPU",
    "device.memory_fraction": "a GPU",
    "chat.web=true": "a browser, whose tests are those of the page",
    "model.hub=modelscope": "the package modelscope and a network",
    "model.revision=": "a network",
}
"""Things that a line needs and that are not available here."""


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Replacements for names on the page: by the argument if it identifies the thing, else by the name alone."""
    folder = tmp_path_factory.mktemp("examples")
    config = json.loads((TINY / "config.json").read_text())
    (folder / "prompts.txt").write_text(
        "Once upon a time there was a girl who had a dog and a cat, and they were all good.\n"
    )
    (folder / "rows.jsonl").write_text('{"src": "Once", "tgt": "x"}\n')
    (folder / "keys").write_text("me sk-test-0123456789abcdef\n")
    (folder / "keys").chmod(0o600)
    heads, channels = config["num_key_value_heads"], config["hidden_size"] // config["num_attention_heads"]
    write_paddle(folder / "prefix.npy", 3, config["num_hidden_layers"], heads, channels)
    write_adapter(folder / "adapter", TINY, LlamaForCausalLM, r=2, target_modules=["q_proj"])
    gguf = ("task=convert", "convert.format=gguf", f"convert.output={folder / 'gguf'}", f"model.path={TINY}")
    earlier = ("model=tiny", "predict.data=Hi", "decode.max_new_tokens=2", "device=cpu")
    for name, arguments in (("gguf-run", gguf), ("earlier", earlier)):
        done = run(*arguments, f"hydra.run.dir={folder / name}")
        assert done.returncode == 0, done.stderr
    (file,) = (folder / "gguf").glob("*.gguf")
    return {
        "--config-path FOLDER": f"--config-path {folder / 'earlier'}",
        "a:FOLDER": f"a:{folder / 'adapter'}",
        "p:FOLDER": f"p:{folder / 'prefix.npy'}",
        "convert.lora=FOLDER": f"convert.lora={folder / 'adapter'}",
        "convert.output=FOLDER": "convert.output=OUT/made",
        "export.output=FOLDER": "export.output=OUT/made",
        "predict.output_file=FILE.json": "predict.output_file=OUT/out.json",
        "FILE.jinja": "none",
        "serve.api_keys=FILE": f"serve.api_keys={folder / 'keys'}",
        "FILE.jsonl": str(folder / "rows.jsonl"),
        "FILE.txt": str(folder / "prompts.txt"),
        "FILE.gguf": str(file),
        "=FOLDER": f"={TINY}",
        "TEXT": "Once",
        "NAME": "mine",
    }


def lines() -> list[str]:
    """Return each command of the page once, without those whose needs are not available."""
    ours = dict.fromkeys(row.arguments for rows in SECTIONS.values() for row in rows if row.arguments)
    return [line for line in ours if not any(absent in line for absent in ABSENT)]


def arguments_of(line: str, examples: dict[str, str], out: Path) -> list[str]:
    for name, example in examples.items():
        line = line.replace(name, example)
    arguments = line.replace("OUT", str(out)).split()
    assert not any(word.isupper() for argument in arguments for word in argument.split("=")), (
        f"{line} has a name that is not replaced"
    )
    keys = {argument.partition("=")[0] for argument in arguments}
    if "--config-path" in keys:
        return [*arguments, f"hydra.run.dir={out}"]
    task = next((argument.removeprefix("task=") for argument in arguments if argument.startswith("task=")), "predict")
    settings = {"device": "cpu", "device.threads": "1", "model": "tiny"}
    if "model.path" in keys:
        del settings["model"]
    if "device" in keys:
        del settings["device"]
    if task == "convert":
        settings = {"model": settings["model"]}
    if task == "predict":
        settings |= {"predict.data": "Once", "decode.max_new_tokens": "2"}
        if "decode.max_length" in keys:
            arguments = [argument.replace("decode.max_length=2048", "decode.max_length=20") for argument in arguments]
            del settings["decode.max_new_tokens"]
    if task == "bench":
        settings |= {"bench.prompt_tokens": "8", "bench.new_tokens": "2", "bench.repeats": "1"}
    if any(
        argument.startswith(("quant=a8w8", "quant.kv_cache_scales", "quant.method=imatrix")) for argument in arguments
    ):
        settings |= {"calibrate.num_samples": "1", "calibrate.sequence_length": "2"}
    limits = {"model.max_length=4096": "model.max_length=64"}  # the bundled model's context is shorter
    arguments = [limits.get(argument, argument) for argument in arguments]
    return [
        *(f"{key}={value}" for key, value in settings.items() if key not in keys),
        *arguments,
        f"hydra.run.dir={out}",
    ]


@pytest.mark.long
def test_each_line_that_is_not_a_server_runs(
    examples: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUINTET_OUTPUTS", str(tmp_path / "kept"))
    commands = [line for line in lines() if "task=serve" not in line]
    assert len(commands) > 30
    for number, line in enumerate(commands):
        if "parallel=ray" in line and not find_spec("ray"):
            continue
        out = tmp_path / str(number)
        done = run(*arguments_of(line, examples, out), stdin="")
        assert done.returncode == 0, f"{line}: {done.stderr}"
        assert (out / "config.yaml").is_file(), line


@pytest.mark.long
def test_the_lines_of_servers_go_together(examples: dict[str, str], tmp_path: Path) -> None:
    """All of them start one server, which becomes ready and ends."""
    servers = [line for line in lines() if "task=serve" in line]
    assert len(servers) > 3
    options = dict.fromkeys(part for line in servers for part in line.split() if part != "task=serve")
    arguments = [
        part
        for part in arguments_of(" ".join(["task=serve", *options]), examples, tmp_path)
        if not part.startswith("hydra")
    ]
    with served(tmp_path / "run", "model=tiny", *(part for part in arguments if part.startswith("serve."))) as (
        process,
        url,
    ):
        assert url.startswith("http")
        code, errors = ended(process, signal.SIGTERM)
        # Ray repeats warnings of its daemon about the machine, for example of a disk that is nearly full
        assert (code, [line for line in errors.splitlines() if "(raylet)" not in line]) == (0, [])
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["serve"]["model_name"] == "mine"
