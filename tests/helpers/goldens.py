"""Every golden family: its checkpoint, and greedy tokens of it."""

from pathlib import Path
from typing import Any

from conf.decoding import DecodeConfig
from pipelines.engine import Engine
from tests.helpers.builders import REPOSITORY, complete

GOLDENS = REPOSITORY / "tests" / "goldens"
FAMILIES = [
    "baichuan-13b",
    "baichuan-7b",
    "baichuan2-13b",
    "baichuan2-7b",
    "bloom",
    "chatglm",
    "chatglm2",
    "chatglm3",
    "chatglm_28layers",
    "chatglm_bin",
    "gemma2",
    "gpt2",
    "llama3",
    "llama_tied_bias",
    "mistral",
    "mixtral",
    "opt",
    "qwen",
    "qwen2",
    "qwen2_full",
    "qwen2_moe",
    "qwen3",
]
WHOLE_PROMPTS = ["chatglm", "chatglm_28layers", "chatglm_bin"]  # their prompts cannot be cut
MARKS = {"chatglm": [281, 284], "chatglm_28layers": [301, 304], "chatglm_bin": [281, 284]}  # [gMASK] and <sop>
TOLERANCE = 3e-5  # the sets' own: five times the noise seen between two correct float32 builds


def link(family: str, folder: Path, spelling: str = "config.json") -> Path:
    """The family's checkpoint alone, with one of the spellings of its config."""
    for file in (GOLDENS / family).iterdir():
        if file.name.endswith((".safetensors", ".bin", ".index.json")) and not file.name.startswith("golden"):
            (folder / file.name).symlink_to(file)
    (folder / "config.json").symlink_to(GOLDENS / family / spelling)
    return folder


def greedy(engine: Engine, prompts: list[list[int]], count: int, **decode: Any) -> list[list[int]]:
    config = DecodeConfig(max_new_tokens=count, ignore_eos=True, **decode)
    return [completion.token_ids for completion in complete(engine, prompts, config)]
