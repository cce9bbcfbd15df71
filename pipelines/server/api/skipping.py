"""Fields and objects of requests that are accepted and have no effect. A response header lists their names."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from pydantic import BaseModel

HEADER = b"x-quintet-warning"


@dataclass(frozen=True)
class NotUsed:
    """Marks a field that has no effect. It is accepted because common clients send it.

    `unless`: values that ask for nothing, so they cause no warning.
    """

    unless: tuple[object, ...] = ()


class Skippable:
    """A class of objects that are left out of the request."""

    type: str
    """The value that names the object in the warning. The class lists the allowed values."""


def not_used(value: object, path: str = "") -> Iterator[str]:
    """Yield the paths of the set fields that are marked `NotUsed`, and of the skipped objects. Paths may repeat."""
    if isinstance(value, list):
        for item in value:
            yield from not_used(item, path)
    elif isinstance(value, Skippable):
        yield f"{path}.{value.type}"
    elif isinstance(value, BaseModel):
        for name, marker in _marked_fields(type(value)).items():
            field_value = getattr(value, name)
            if field_value is None:
                continue
            field_path = f"{path}.{name}" if path else name
            if marker is None:
                yield from not_used(field_value, field_path)
            elif field_value not in marker.unless:
                yield field_path


def warning_of(names: Iterator[str]) -> list[str]:
    """Return the warning about unused fields as a list of one line; empty if there are none."""
    listed = ", ".join(sorted(set(names)))
    return [f"not used: {listed}"] if listed else []


def header_of(warnings: list[str]) -> list[tuple[bytes, bytes]]:
    """Return the response header with the warnings of a request; empty if there are none."""
    return [(HEADER, "; ".join(warnings).encode("ascii", "replace"))] if warnings else []


@cache
def _marked_fields(kind: type[BaseModel]) -> dict[str, NotUsed | None]:
    """Return the fields of a class with their mark; None for a field without a mark."""
    return {
        name: next((mark for mark in field.metadata if isinstance(mark, NotUsed)), None)
        for name, field in kind.model_fields.items()
    }
