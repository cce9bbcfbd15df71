"""The tables of models/README.md and models/types.md equal the registry, the tests and transformers' mapping; `python -m
tests.models.test_families_table` prints the first, with the argument `types` the second."""

import re
import sys

from models.config import ConfigReader
from models.formats.wrapper import TEXT_MODELS
from models.registry import ARCHITECTURES, CHATGLM2, Architecture, find_architecture
from tests.helpers.builders import REPOSITORY
from tests.helpers.catalog import GOLDEN_FAMILIES, GOLDENS, ROWS
from tests.helpers.hybrid_families import HYBRID
from tests.helpers.model_types import NOT_SUPPORTED, OTHER_NAMES

TESTS = REPOSITORY / "tests" / "models" / "families"


def table() -> str:
    rows = [*ARCHITECTURES.items(), ("chatglm", CHATGLM2)]
    lines = [
        f"| {a.families} | `{model_type}` | {proof(a)} |"
        for model_type, a in sorted(rows, key=lambda row: row[1].families)
    ]
    return "\n".join(["| families | `model_type` | tested against |", "|---|---|---|", *lines])


def proof(architecture: Architecture) -> str:
    """Return the goldens of its original code that are tested, and the comparisons of its row of the table or its own
    file."""
    goldens = [
        name for name in GOLDEN_FAMILIES if find_architecture(ConfigReader.from_folder(GOLDENS / name)) is architecture
    ]
    sources = [f"its original code ({', '.join(goldens)})"] if goldens else []
    module = architecture.read_config.__module__.rpartition(".")[2]
    file = TESTS / f"test_{module.removesuffix('_config')}.py"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    is_row = any(ARCHITECTURES[row.model_type or name] is architecture for name, row in (ROWS | HYBRID).items())
    if is_row or re.search(r"equals_transformers\(|^(import|from) transformers\b", text, re.MULTILINE):
        sources.append("transformers")
    if "its formulas in float64" in text:
        sources.append("its formulas in float64")
    assert sources, f"nothing proves {architecture.families}"
    return ", ".join(sources)


def causal_types() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def types_page() -> str:
    """Return the page about all causal model types of transformers."""
    reasons = {name: reason for reason, names in NOT_SUPPORTED.items() for name in names.split()}
    rows, num_supported = list[str](), 0
    for name in causal_types():
        paths = [
            *([ARCHITECTURES[name].families] if name in ARCHITECTURES else []),
            *([f"text only, as `{TEXT_MODELS[name]}`"] if name in TEXT_MODELS else []),
            *([f"its files have `{OTHER_NAMES[name]}`"] if name in OTHER_NAMES else []),
        ]
        assert len(paths) + (name in reasons) == 1, f"{name} needs one entry: {paths}, {reasons.get(name)}"
        num_supported += len(paths)
        rows.append(f"| `{name}` | {f'yes | {paths[0]}' if paths else f'no | {reasons[name]}'} |")
    head = f"Quintet runs {num_supported} of the {len(rows)} model types that `AutoModelForCausalLM` of transformers 5.23 has."
    return "\n".join(
        ["# Model types", "", head, "", "| `model_type` | runs | as, or why not |", "|---|---|---|", *rows, ""]
    )


def test_the_readme_has_it() -> None:
    assert table() in (REPOSITORY / "models" / "README.md").read_text(encoding="utf-8")


def test_every_causal_type_of_transformers_has_a_row() -> None:
    assert {name for names in NOT_SUPPORTED.values() for name in names.split()} <= {*causal_types()}
    assert types_page() == (REPOSITORY / "models" / "types.md").read_text(encoding="utf-8")


if __name__ == "__main__":
    print(types_page() if "types" in sys.argv[1:] else table(), end="")
