"""The parameters of tools as JSON schemas: references, alternatives and properties."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conf.errors import UserError, shortened
from conf.json_schemas import BY_NAME, DATA, LITERALS, prepared
from pipelines.server.api.errors import bad_request, not_allowed

Schema = dict[str, Any]

MAX_STEPS = 16
"""Most references and alternatives inside one another, without a property between them."""
MAX_OPTIONS = 64
"""Most alternatives of a schema."""
NOTES = ("title", "description", "$comment", "$schema", "$id", "$anchor", "$defs", "definitions", "deprecated", *DATA)
"""Keywords that restrict nothing."""
UNWRITTEN = (
    *("not", "if", "then", "else", "patternProperties", "propertyNames", "minProperties", "maxProperties"),
    *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems"),
    *("prefixItems", "contains", "minContains", "maxContains", "uniqueItems", "$dynamicRef", "$recursiveRef"),
)
"""Keywords that only %json rules follow."""
COMBINING = ("$ref", "anyOf", "oneOf", "allOf")

SHAPES: dict[str, type] = {
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "enum", "required"), list),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), int),
    **dict.fromkeys(("type", "pattern", "format"), str),
    "properties": dict,
}
"""The types of values by keyword."""


@dataclass(frozen=True)
class Members:
    """The properties of an object."""

    properties: Mapping[str, Any]
    required: frozenset[str]
    additional: Any
    """The schema of other properties; None: there are none."""


class Parameters:
    """The schema of a tool's arguments, which is always of an object."""

    def __init__(self, schema: Schema, param: str) -> None:
        """`param`: the request's field with the schema."""
        self.schema, self._param = schema, param

    @classmethod
    def of_tool(cls, function: Mapping[str, Any], param: str) -> "Parameters":
        """Return the schema that a tool states. Raises ApiError (400) for arguments that are no object."""
        schema = function.get("parameters") or {"properties": {}, "additionalProperties": False}
        kind = schema.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise not_allowed(f"{param}.type", kind, "the arguments of a call are an object: give 'object'")
        try:
            return cls({**prepared(schema), "type": "object"}, param)
        except UserError as error:
            raise bad_request(f"{param} cannot be used: {error}", param) from error

    def refuse(self, what: str, remedy: str) -> Exception:
        """Return the error (400) for a schema that the model's form of calls cannot follow."""
        message = f"{self._param} has {what}, which calls in this model's format cannot be made to follow: {remedy}"
        return bad_request(message, self._param)

    def options(self, schema: Any, depth: int = 0) -> list[Schema]:
        """Return the alternatives of a schema, without references and without anyOf, oneOf and allOf."""
        if isinstance(schema, bool):
            return [{}] if schema else []
        self._check_shape(schema)
        rest = {name: value for name, value in schema.items() if name not in COMBINING}
        if depth > MAX_STEPS:
            raise self.refuse("references or alternatives of too many levels", "simplify it")
        results = [rest]
        if "$ref" in schema:
            results = self._both(results, self.options(self.target(schema["$ref"]), depth + 1))
        for part in schema.get("allOf", ()):
            results = self._both(results, self.options(part, depth + 1))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                parts = [option for part in schema[keyword] for option in self.options(part, depth + 1)]
                results = self._both(results, parts)
        return results

    def members(self, schema: Schema) -> Members:
        """Return the properties of an alternative that is an object. Raises ApiError for other limits on objects."""
        self.check(schema)
        required = schema.get("required", [])
        properties = {name: value for name, value in schema.get("properties", {}).items() if value is not False}
        additional = schema.get("additionalProperties", None if properties else {})
        additional = None if additional is False else additional
        missing = [name for name in required if name not in properties]
        is_closed = additional is None and "additionalProperties" in schema
        if missing and (is_closed or missing[0] in schema.get("properties", {})):
            raise self.refuse(f"the required property {shortened(missing[0])} without a schema", "describe it")
        others = dict.fromkeys(missing, {} if additional is None else additional)
        return Members({**properties, **others}, frozenset(required), additional)

    def check(self, schema: Schema) -> None:
        """Raise ApiError (400) if a schema has a keyword that only JSON can be made to follow."""
        for name in UNWRITTEN:
            if name in schema:
                raise self.refuse(f"the keyword {name}", "leave it out")

    def _check_shape(self, schema: Any) -> None:
        """Raise ApiError (400) for what is no schema, and for a keyword whose value has the wrong type."""
        if not isinstance(schema, dict):
            raise bad_request(f"{self._param} cannot be used: {shortened(repr(schema))} is no schema", self._param)
        for name, kind in SHAPES.items():
            if name not in schema:
                continue
            value = schema[name]
            is_right = type(value) is kind or (name == "type" and type(value) is list)
            if name in ("type", "required") and is_right:
                is_right = all(isinstance(text, str) for text in value)
            if not is_right:
                raise bad_request(f"{self._param} cannot be used: {name}={shortened(repr(value))}", self._param)

    def target(self, reference: Any) -> Any:
        """Return the schema that a reference within the parameters names."""
        place: Any = self.schema
        text = str(reference)
        if text.startswith("#/"):
            for step in text[2:].split("/"):
                step = step.replace("~1", "/").replace("~0", "~")
                if isinstance(place, list) and step.isdecimal() and int(step) < len(place):
                    place = place[int(step)]
                else:
                    place = place.get(step) if isinstance(place, dict) else None
        elif text != "#":
            place = _anchored(self.schema, text.removeprefix("#")) if text.startswith("#") else None
        if not isinstance(place, dict | bool):
            raise self.refuse(f"$ref {shortened(text)} to a schema that it lacks", "define it in $defs")
        return place

    def self_contained(self, schema: Any) -> Schema:
        """Return a part of the parameters with the definitions that it refers to."""
        if not isinstance(schema, dict):
            return {"not": {}} if schema is False else {}
        names: dict[str, str] = {}

        def renamed(part: Any) -> Any:
            if isinstance(part, list):
                return [renamed(item) for item in part]
            if not isinstance(part, dict):
                return part
            kept: Schema = {}
            for keyword, value in part.items():
                if keyword == "$ref":
                    value = f"#/$defs/{names.setdefault(str(value), f'd{len(names)}')}"
                elif keyword in ("$defs", "definitions", "$anchor", "$id"):
                    continue
                elif keyword in BY_NAME and isinstance(value, dict):
                    value = {name: renamed(subschema) for name, subschema in value.items()}
                elif keyword not in (*LITERALS, *DATA):
                    value = renamed(value)
                kept[keyword] = value
            return kept

        result: Schema = renamed(schema)
        definitions: Schema = {}
        while len(definitions) < len(names):
            reference = list(names)[len(definitions)]
            definitions[names[reference]] = renamed(self.target(reference))
        return {**result, "$defs": definitions} if definitions else result

    def _both(self, left: list[Schema], right: list[Schema]) -> list[Schema]:
        if len(left) * len(right) > MAX_OPTIONS:
            raise self.refuse(f"more than {MAX_OPTIONS} alternatives", "simplify it")
        return [merged for one in left for other in right if (merged := self._merged(one, other)) is not None]

    def _merged(self, one: Schema, other: Schema) -> Schema | None:
        """Return the schema of values that satisfy both; None if there are none."""
        merged = {**one, **other}
        for name in one.keys() & other.keys():
            left, right = one[name], other[name]
            if name == "type":
                kinds = [kind for kind in kinds_of(one) if kind in kinds_of(other)]
                if not kinds:
                    return None
                merged[name] = kinds if len(kinds) > 1 else kinds[0]
            elif name == "properties":
                merged[name] = {**left, **right}
                for part in (one, other):
                    if part.get("additionalProperties") is False:
                        merged[name] |= dict.fromkeys(merged[name].keys() - part["properties"].keys(), False)
            elif name == "required":
                merged[name] = list(dict.fromkeys([*left, *right]))
            elif left != right and name not in NOTES:
                raise self.refuse(f"two values of {shortened(name)} for one schema", "give one")
        return merged


def kinds_of(schema: Schema) -> list[str]:
    """Return the names of the types that a schema without alternatives states; [] if it states none."""
    kind = schema.get("type", [])
    return kind if isinstance(kind, list) else [str(kind)]


def has_only(schema: Any, *keywords: str) -> bool:
    """Return whether a schema has no other keywords than these that restrict anything."""
    return schema is True or (isinstance(schema, dict) and all(name in (*keywords, *NOTES) for name in schema))


def _anchored(schema: Any, anchor: str) -> Any:
    """Return the part of a schema with this $anchor; None if there is none."""
    stack = [schema]
    while stack:
        part = stack.pop()
        if isinstance(part, dict) and part.get("$anchor") == anchor:
            return part
        if isinstance(part, dict | list):
            stack += part.values() if isinstance(part, dict) else part
    return None
