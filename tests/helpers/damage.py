"""Damage to the bytes of a file, drawn by hypothesis."""

import os
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

MUTATIONS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "number"]), st.floats(0, 1, exclude_max=True), st.integers(0, 255)
    ),
    min_size=1,
    max_size=4,
)


def mutated(content: bytes, mutations: list[tuple[str, float, int]], head: int) -> bytes:
    """Return the bytes changed within the first `head` bytes, which describe the file, or cut anywhere."""
    data = bytearray(content)
    for kind, where, value in mutations:
        at = int(where * min(head, len(data)))
        if kind == "cut":
            del data[int(where * len(data)) :]
        elif kind == "flip" and at < len(data):
            data[at] ^= value or 1
        elif kind == "insert":
            data[at:at] = bytes([value]) * (1 + value % 7)
        elif kind == "number" and at < len(data):
            data[at : at + 1] = str(10 ** (value % 20)).encode()
    return bytes(data)


class RunsCode:
    """Creates a folder when it is unpickled without restrictions."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._trace),)
