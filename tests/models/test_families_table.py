"""The table of families in models/README.md equals the registry and the tests; `python -m
tests.models.test_families_table` prints it."""

import re

from models.config import ConfigReader
from models.registry import ARCHITECTURES, CHATGLM2, Architecture, find_architecture
from tests.helpers.builders import REPOSITORY
from tests.helpers.catalog import GOLDEN_FAMILIES, GOLDENS, ROWS
from tests.helpers.hybrid_families import HYBRID

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


def test_the_readme_has_it() -> None:
    assert table() in (REPOSITORY / "models" / "README.md").read_text(encoding="utf-8")


if __name__ == "__main__":
    print(table())
