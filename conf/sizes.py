"""Sizes of memory as settings give them."""

import re

SIZE = re.compile(r"(\d{0,18}\.?\d{1,18}) ?([KMGT]?)(i?)(B?)", re.IGNORECASE)


def num_bytes(text: str, whole: int = 0) -> int:
    """Return the bytes of a size: 500MB (1000s), 2GiB (1024s), 4096, or below 1 a fraction of `whole`. Returns 0 for anything else."""
    match = SIZE.fullmatch(text)
    if match is None:
        return 0
    number, (unit, binary, byte) = float(match[1]), match.groups()[1:]
    if number < 1 and not unit + byte:
        return int(number * whole)
    return int(number * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))
