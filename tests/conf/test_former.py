"""Options of other tools: each gets the answer of MIGRATION.md, and each option that the page names exists."""

import pytest

from conf.compose import checked, compose_run_config, for_hydra
from conf.errors import UserError
from conf.former import PAGE, SECTIONS, page
from conf.schema import DeviceType
from tests.helpers.cases import each

EXAMPLES = {
    "FOLDER": "/x",
    "FILE.jsonl": "/x.jsonl",
    "FILE.json": "/x.json",
    "FILE.txt": "/x.txt",
    "FILE.gguf": "/x.gguf",
    "TEXT": "a",
}
"""Replacements for names on the page."""


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.long
@each("tool", SECTIONS, quick=["llama.cpp"])
def test_each_option_on_the_page_composes(tool: str) -> None:
    for row in SECTIONS[tool]:
        assert row.arguments or row.note
        ours = row.arguments
        for name, example in EXAMPLES.items():
            ours = ours.replace(name, example)
        if ours and not ours.startswith("--"):
            compose_run_config(ours.split())


def test_an_option_of_another_tool_is_answered_with_ours() -> None:
    for tool, rows in SECTIONS.items():
        for row in rows:
            typed = row.option.removeprefix("-m ")
            with pytest.raises(UserError) as raised:
                checked([typed])
            assert typed in str(raised.value)
            assert row.arguments.replace("FILE.gguf", typed) in str(raised.value)
            assert tool in str(raised.value)
            assert "\n" not in str(raised.value)


@each(
    ("arguments", "ours"),
    [
        (["--src-length", "5"], "predict.truncate=left"),
        (["--trust-remote-code"], "leave it out"),
        (["--Tensor_parallel_size", "2"], None),
        (["--gpu-memory-utilization=0.5"], "device.memory_fraction=0.9"),
        (["quant_type=weight_only_int4"], "quant=int4"),
        (["-m", "model.gguf", "-p", "Hi"], "model.path=model.gguf"),
        (["mode=static"], "model.path=FOLDER"),
        (["decode.max_length=9", "model=tiny", "--cfg", "job", "-p", "model"], None),
        (["--config-dir", "/mine", "quant=awq", "device=gpu"], None),  # its folder may have such options
    ],
)
def test_ways_to_type_them(arguments: list[str], ours: str | None) -> None:
    if ours is None:
        assert set(arguments) <= set(for_hydra(arguments))
        return
    with pytest.raises(UserError) as raised:
        for_hydra(arguments)
    assert ours in str(raised.value)


def test_gpu_is_cuda() -> None:
    assert compose_run_config(["device=gpu"]).device.type is DeviceType.cuda
