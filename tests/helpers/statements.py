"""The statements of a Python file. Standard library only."""

import ast
from collections.abc import Iterator
from pathlib import Path

BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")


def statements(code: str | Path) -> Iterator[ast.AST]:
    """Yield the file's statements at any depth. Expressions are not walked: they are most nodes, and their walk is
    slow."""
    todo: list[ast.AST] = [ast.parse(code if isinstance(code, str) else code.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        yield node
        blocks = (getattr(node, name, []) for name in BLOCKS)
        todo += (inside for block in blocks if isinstance(block, list) for inside in block)
