"""Converts pydantic's validation errors to one API error about the field that the client must change.

A union without a match gives the errors of all its alternatives. `type` and `role` tell which one was meant.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from conf.errors import shortened
from pipelines.server.api.errors import ApiError, bad_request, not_allowed

PREFIX = "Input should be "  # start of many pydantic messages
OBJECT_TYPES = ("model_type", "model_attributes_type", "dict_type")  # errors whose messages name Python classes


class Fault(NamedTuple):
    """An error of `ValidationError.errors()`."""

    path: str
    """Path of the field in API notation."""
    error: Mapping[str, Any]

    @property
    def type(self) -> str:
        return str(self.error["type"])

    @property
    def loc(self) -> tuple[int | str, ...]:
        return tuple(self.error["loc"])

    @property
    def wants_another_type(self) -> bool:
        return self.type.endswith("_type")

    @property
    def is_of_another_alternative(self) -> bool:
        """Whether the object's `type` or `role` excludes this alternative of a union."""
        return self.loc[-1:] in (("type",), ("role",)) and self.type in ("literal_error", "missing")

    @property
    def expected(self) -> str:
        """The expected value, such as "a valid string", or pydantic's whole message."""
        return "an object" if self.type in OBJECT_TYPES else str(self.error["msg"]).removeprefix(PREFIX)


def validation_error(errors: Sequence[Mapping[str, Any]], body: object, unsupported: Mapping[str, str]) -> ApiError:
    """Return the error of status 400 for a body, in one line about the first wrong field.

    `errors`: from `ValidationError.errors()`. `unsupported`: known but unsupported fields with their remedies.
    """
    field = errors[0]["loc"][:1]
    faults = [Fault(_path(error["loc"], body, error["type"] == "missing"), error) for error in errors]
    faults = [fault for fault in faults if fault.loc[:1] == field]
    fault, alike = _to_blame(faults)
    path, error = fault.path, fault.error
    match fault.type:
        case "missing":
            return bad_request(f"{path} is missing: give it", path)
        case "union_tag_not_found":
            path += "." + error["ctx"]["discriminator"].strip("'")
            return bad_request(f"{path} is missing: give it", path)
        case "union_tag_invalid":
            path += "." + error["ctx"]["discriminator"].strip("'")
            return not_allowed(path, error["ctx"]["tag"], f"give {_any_of([error['ctx']['expected_tags']])}")
        case "literal_error":
            return not_allowed(
                path, error["input"], f"give {_any_of(fault.error['ctx']['expected'] for fault in alike)}"
            )
        case "extra_forbidden":
            remedy = unsupported.get(str(fault.loc[-1]), "there is no such field here: leave it out")
            return bad_request(f"{shortened(path)} is not supported: {remedy}", shortened(path))
    message = " or ".join(dict.fromkeys(fault.expected for fault in alike))
    message = f"give {message}" if error["msg"].startswith(PREFIX) else message[:1].lower() + message[1:]
    if not path:
        return bad_request(f"the body is not allowed: {message}", None)
    return not_allowed(path, error["input"], message)


def _to_blame(faults: Sequence[Fault]) -> tuple[Fault, list[Fault]]:
    """Return the fault of the best-fitting alternative, and all faults of its field and type, including this one."""
    excluded = {fault.loc[:-1] for fault in faults if fault.is_of_another_alternative}
    inner = [fault for fault in faults if not _is_outer(fault, faults)]
    fitting = [fault for fault in inner if not any(fault.loc[: len(prefix)] == prefix for prefix in excluded)]
    fault = max(fitting or inner, key=_progress)
    kinds = [candidate for candidate in inner if candidate.path == fault.path and len(candidate.loc) == len(fault.loc)]
    if fault.wants_another_type:
        return fault, [
            candidate for candidate in faults if candidate.path == fault.path and candidate.wants_another_type
        ]
    return fault, [candidate for candidate in kinds if candidate.type == fault.type]


def _is_outer(fault: Fault, faults: Iterable[Fault]) -> bool:
    """Return whether a fault rejects a value's type, although another alternative has a fault inside this value."""
    prefixes = (fault.path + ".", fault.path + "[")
    is_outer = any(inner.path.startswith(prefixes) for inner in faults)
    return is_outer and (fault.wants_another_type or fault.type == "literal_error")


def _progress(fault: Fault) -> tuple[bool, int, list[int], bool]:
    """Return a sort key for how well a body fits an alternative: type, then depth and list position of the fault."""
    numbers = [step for step in fault.loc if isinstance(step, int)]
    return not fault.wants_another_type, len(fault.loc), numbers, fault.type == "literal_error"


def _any_of(expected: Iterable[str]) -> str:
    """Join names with commas and "or". An item of `expected` is one quoted name or a list of quoted names."""
    names = list(dict.fromkeys(re.findall(r"'[^']*'|\S+", " ".join(text.replace(" or ", ", ") for text in expected))))
    names = [name.strip(",") for name in names if name.strip(",")]
    return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]


def _path(loc: Sequence[int | str], body: object, is_missing: bool) -> str:
    """Return a location in API notation. Steps that name a union's alternative are omitted: they are not keys."""
    path = ""
    for i, step in enumerate(loc):
        is_last = i == len(loc) - 1
        if isinstance(step, int):
            path += f"[{step}]"
            body = body[step] if isinstance(body, list) and step < len(body) else None
        elif isinstance(body, dict) and (_is_key(step, body, is_last) or (is_missing and is_last)):
            path += f".{step}" if path else step
            body = body.get(step)
    return path


def _is_key(step: str, body: Mapping[str, Any], is_last: bool) -> bool:
    """Return whether a step is a key of the body. The name of a union's alternative (the value of `type` or
    `role`) is not a key."""
    is_tag = step in (body.get("type"), body.get("role")) and not isinstance(body.get(step), dict | list)
    return step in body and (is_last or not is_tag)
