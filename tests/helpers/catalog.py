"""The small models that tests use: the goldens, one model of every other family, and prompts for them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from conf.decoding import DecodeConfig
from pipelines.engine import Engine
from tests.helpers.builders import REPOSITORY, complete
from tests.helpers.deepseek import CASES, V2_GROUPS, V3_GROUPS, build, change_config
from tests.helpers.dense_families import DENSE
from tests.helpers.ernie3_5 import CONFIG as ERNIE3_5
from tests.helpers.ernie3_5 import make_arrays
from tests.helpers.ernie3_5 import write as write_paddle
from tests.helpers.expert_families import EXPERTS
from tests.helpers.gemma_families import GEMMAS
from tests.helpers.gpt_families import GPT
from tests.helpers.layer_norm_families import WITH_LAYER_NORMS
from tests.helpers.llama_families import CHANGED_LLAMAS
from tests.helpers.oracle import random_prompts

GOLDENS = REPOSITORY / "tests" / "goldens"
GOLDEN_FAMILIES = [  # folders of GOLDENS
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
# Families of every kind of layer, for slow tests of all families.
QUICK = ("gpt2", "llama3", "chatglm", "chatglm3", "qwen2_moe", "gemma3")
WHOLE_PROMPTS = ["chatglm", "chatglm_28layers", "chatglm_bin"]  # their prompts cannot be cut
MARKS = {"chatglm": [281, 284], "chatglm_28layers": [301, 304], "chatglm_bin": [281, 284]}  # [gMASK] and <sop>
TOLERANCE = 3e-5  # the sets' own tolerances: five times the noise between two correct float32 builds
DEEPSEEK = ["v2", "v2_no_q_lora", "v2_biases_tied", "v3", "v3_yarn"]  # CASES with one entry per layout
PROMPTS = random_prompts(96, (5, 1, 40))  # prompts of one token, of less than a block, and of more
BEGINNING = list(range(5, 15))
SHARED_PROMPTS = [[*BEGINNING, 20], [21], [*BEGINNING, 22, 23, 24, 25], [*BEGINNING, 20], [30, 31, 32]]
FOUR_PROMPTS = [[5, 6, 7], [8], list(range(9, 40)), [16, 17, 18, 19]]


def link(family: str, folder: Path, spelling: str = "config.json") -> Path:
    """Link the family's checkpoint into a folder, with one of the spellings of its config."""
    for file in (GOLDENS / family).iterdir():
        if file.name.endswith((".safetensors", ".bin", ".index.json")) and not file.name.startswith("golden"):
            (folder / file.name).symlink_to(file)
    (folder / "config.json").symlink_to(GOLDENS / family / spelling)
    return folder


def greedy(engine: Engine, prompts: list[list[int]], count: int, **decode: Any) -> list[list[int]]:
    config = DecodeConfig(max_new_tokens=count, ignore_eos=True, **decode)
    return [completion.token_ids for completion in complete(engine, prompts, config)]


ROWS = DENSE | GEMMAS | CHANGED_LLAMAS | WITH_LAYER_NORMS | GPT | EXPERTS
"""Every architecture that is compared with its class in transformers."""
OTHERS = {name: row for name, row in ROWS.items() if name not in (*GOLDEN_FAMILIES, "llama", "glm4_moe_lite")}
OTHERS["falcon_one_key"] = replace(ROWS["falcon"], variants=ROWS["falcon"].variants[1:])
"""Architectures without a golden, by the first of their variants."""


def write_other(folder: Path, family: str, **changes: Any) -> Any:
    """Write a random model of one of OTHERS, and return transformers' model of it."""
    row = OTHERS[family]
    return row.write(folder, **{"eos_token_id": 1, **row.variants[0], **changes})


def write_family(folder: Path, family: str) -> None:
    """Write a random model of a golden, of OTHERS or of DeepSeek's cases."""
    if family in CASES:
        version, config = CASES[family]
        build(version, **config).save_pretrained(folder)
    elif family in OTHERS:
        write_other(folder, family)
    else:
        link(family, folder)


def write_kimi(folder: Path) -> None:
    build(3, n_group=1, topk_group=1).save_pretrained(folder)
    change_config(folder, model_type="kimi_k2")


# By family: a function that writes its small model into a folder. Families whose prompts cannot be cut are left out.
FAMILIES: dict[str, Callable[[Path], object]] = {name: partial(write_other, family=name) for name in OTHERS}
FAMILIES |= {
    "deepseek_v2": lambda folder: build(2, **V2_GROUPS).save_pretrained(folder),
    "deepseek_v3": lambda folder: build(3, **V3_GROUPS).save_pretrained(folder),
    "ernie3_5": lambda folder: write_paddle(folder, make_arrays(ERNIE3_5), ERNIE3_5),
    "glm4_moe_lite": ROWS["glm4_moe_lite"].write,
    "kimi_k2": write_kimi,
}
FAMILIES |= {name: partial(link, name) for name in GOLDEN_FAMILIES if name not in WHOLE_PROMPTS}


def prompts_for(family: str) -> list[list[int]]:
    """Return a prompt of more tokens than a block: the golden's own prompt if there is one."""
    golden = GOLDENS / family / "golden.safetensors"
    return [load_file(golden)["input_ids"][0].tolist() if golden.is_file() else list(range(3, 12))]
