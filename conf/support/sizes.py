"""Parse memory sizes in settings."""

import re

SIZE = re.compile(r"(\d{0,18}\.?\d{1,18}) ?([KMGT]?)(i?)(B?)", re.IGNORECASE)


def num_bytes(text: str, total: int = 0) -> int:
    """Return the bytes of a size: 500MB (powers of 1000), 2GiB (powers of 1024) or 4096; 0 for an invalid size.

    A number below 1 is a fraction of `total`.
    """
    match = SIZE.fullmatch(text)
    if match is None:
        return 0
    number, (unit, binary, byte) = float(match[1]), match.groups()[1:]
    if number < 1 and not unit + byte:
        return int(number * total)
    return int(number * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))
