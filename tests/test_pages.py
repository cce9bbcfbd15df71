"""The links and settings in the documentation exist."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from conf.schema import RunConfig
from tests.helpers.builders import REPOSITORY

DOCUMENTS = [file for pattern in ("*.md", "*/*.md") for file in REPOSITORY.glob(pattern)]
PAGES = [REPOSITORY / "README.md", *REPOSITORY.glob("docs/*.md")]
LINK = re.compile(r"\]\((?!https?:)([^()#\s]*)(?:#([^()\s]*))?\)")
SECTIONS = "|".join(field.name for field in dataclasses.fields(RunConfig) if field.name != "task")
SETTING = re.compile(rf"(?<![\w./-])({SECTIONS})\.(?!(?:py|json|md|csv|png|peak_memory)\b)([a-z]\w*)")


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives the headings of a document."""
    without_code = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", without_code, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(document: Path, text: str) -> Iterator[str]:
    for path, anchor in LINK.findall(text):
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            yield f"{path}#{anchor}" if anchor else path


def unknown_settings(text: str) -> Iterator[str]:
    for section, name in SETTING.findall(text):
        if not hasattr(getattr(RunConfig(), section), name):
            yield f"{section}.{name}"


def test_links_exist() -> None:
    texts = {document: document.read_text(encoding="utf-8") for document in DOCUMENTS}
    broken = {str(document): links for document, text in texts.items() if (links := [*broken_links(document, text)])}
    assert broken == {}


def test_settings_exist() -> None:
    texts = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    assert {name: settings for name, text in texts.items() if (settings := [*unknown_settings(text)])} == {}


def test_broken_links_and_unknown_settings_are_found() -> None:
    document, text = (
        REPOSITORY / "README.md",
        "[a](#folders) [b](LICENSE) [c](#two) [d](docs/none.md) [e](conf/README.md#x)",
    )
    assert [*broken_links(document, text)] == ["#two", "docs/none.md", "conf/README.md#x"]
    assert [*unknown_settings("`serve.port=1`, `serve.prot=1`, export.json")] == ["serve.prot"]
