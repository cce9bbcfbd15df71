"""Constraints of settings as metadata of their dataclass fields. `option` declares them, `check_fields` checks them.

A constraint says which values a field allows, and with which values of other settings. The errors of `check_fields` are
sentences made from the metadata: value, limit and remedy. Imports only the standard library.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeVar, get_args

from conf.errors import ErrorCode, UserError, shortened

T = TypeVar("T")


@dataclass(frozen=True)
class Condition:
    """A condition on another setting: `one_of(...)` or `is_set(...)`."""

    values: tuple[Any, ...] | None
    """The values that fulfil the condition; None: every value but the unset one."""
    give: str
    """The remedy: what to give for the other setting; "" for the names of `values`."""
    reason: str
    """Why, as the end of a clause; "" if the sentence needs no reason."""


def one_of(*values: Any, give: str = "", reason: str = "") -> Condition:
    return Condition(values, give, reason)


def is_set(give: str = "", reason: str = "") -> Condition:
    return Condition(None, give, reason)


@dataclass(frozen=True)
class Constraint:
    """The metadata of a field. `option` explains it."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[Any, ...] = ()
    choices_by: tuple[str, Mapping[Any, tuple[Any, ...]]] | None = None
    form: tuple[Callable[[Any], Any], str] | None = None
    note: str = ""
    only_with: Mapping[str, Condition] = field(default_factory=dict)
    not_with: Mapping[str, Condition] = field(default_factory=dict)
    neutral: Any = None
    typed_as: str = ""

    @functools.cached_property
    def has_limits(self) -> bool:
        return any(limit is not None for limit in (self.minimum, self.maximum, self.above, self.below))

    def fault(self, value: Any) -> ErrorCode | None:
        """Return what is wrong with a value that is not null; None for an allowed value."""
        if self.choices:
            if value in self.choices:
                return None
            if self.form is None and not (self.has_limits and isinstance(value, int)):
                return ErrorCode.unknown_value
        if self.has_limits and not self._is_inside(value):
            return ErrorCode.out_of_range
        return ErrorCode.malformed if self.form is not None and not self.form[0](value) else None

    def _is_inside(self, value: float) -> bool:
        """Whether a number is within the limits. NaN is not."""
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def allowed(self, takes_null: bool) -> str:
        """Return the allowed values for an error."""
        if self.form is not None:
            return self.form[1]
        values = [*map(typed, self.choices), *["null"] * takes_null]
        allowed = ", or ".join([self._range(), *values]) if self.has_limits else _or(values)
        return f"{allowed} ({self.note})" if self.note else allowed

    def _range(self) -> str:
        low, high = self.minimum, self.maximum
        if self.below == math.inf:
            return f"a finite number above {self.above}" if low is None else f"a finite number from {low}"
        if self.above is not None:
            if self.below is not None:
                return f"a number between {self.above} and {self.below}"
            return f"a number above {self.above}" + ("" if high is None else f" and up to {high}")
        return f"a number from {low}" + ("" if high is None else f" to {high}")


def option(
    default: T = MISSING,  # type: ignore[assignment]
    *,
    factory: Callable[[], T] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: tuple[Any, ...] = (),
    choices_by: tuple[str, Mapping[Any, tuple[Any, ...]]] | None = None,
    form: tuple[Callable[[Any], Any], str] | None = None,
    note: str = "",
    only_with: Mapping[str, Condition] | None = None,
    not_with: Mapping[str, Condition] | None = None,
    neutral: Any = None,
    typed_as: str = "",
) -> T:
    """Return a dataclass field with a constraint, which `check_fields` checks.

    minimum, maximum: limits of a number; above, below: limits that the number itself must not have.
    choices: the allowed values; with limits or a form, values in addition.
    choices_by: another field of the class, and the allowed values for each of its values.
    form: a function that is true for allowed values, and the allowed values in words.
    note: an explanation of the allowed values.
    only_with: conditions on other settings without which this setting has no effect.
    not_with: conditions on other settings that this setting contradicts.
    neutral: a value without effect, in addition to the default.
    typed_as: the config group whose options set this field.

    only_with and not_with apply to values other than the default, null and `neutral`. Their keys are fields of the same
    class, or dotted keys of the run. Null is an allowed value, except for a `str`.
    """
    constraint = Constraint(
        minimum=minimum,
        maximum=maximum,
        above=above,
        below=below,
        choices=choices,
        choices_by=choices_by,
        form=form,
        note=note,
        only_with=only_with or {},
        not_with=not_with or {},
        neutral=neutral,
        typed_as=typed_as,
    )
    metadata = {"constraint": constraint}
    if factory is None:
        return field(default=default, metadata=metadata)
    return field(default_factory=factory, metadata=metadata)


class _Rule(NamedTuple):
    other: str
    """A field of the same class, or a dotted key of the run."""
    condition: Condition
    must_hold: bool


class _Option(NamedTuple):
    """A field of a config, prepared for checks."""

    name: str
    default: Any
    constraint: Constraint
    is_text: bool
    takes_null: bool
    is_checked: bool
    """Whether it has a constraint."""
    is_always_checked: bool
    """Whether its default can be wrong."""
    rules: tuple[_Rule, ...]
    """The rules with fields of the same class."""
    rules_of_run: tuple[_Rule, ...]
    """The other rules."""

    @property
    def unset(self) -> Any:
        return self.default if self.constraint.neutral is None else self.constraint.neutral

    def is_given(self, value: Any) -> bool:
        if value is None:
            return self.takes_null and self.default is not None
        return bool(value != self.default and value != self.constraint.neutral)


@functools.cache
def _options(config: type) -> dict[str, _Option]:
    return {field.name: _prepared(field, {other.name for other in fields(config)}) for field in fields(config)}


def _prepared(field: Field[Any], names: set[str]) -> _Option:
    constraint = field.metadata.get("constraint", Constraint())
    default = field.default if field.default_factory is MISSING else field.default_factory()
    is_wrong = default is not None and constraint.fault(default) is not None
    rules = [_Rule(other, condition, True) for other, condition in constraint.only_with.items()]
    rules += [_Rule(other, condition, False) for other, condition in constraint.not_with.items()]
    return _Option(
        field.name,
        default,
        constraint,
        is_text=field.type is str,
        takes_null=type(None) in get_args(field.type),
        is_checked=bool(field.metadata),
        is_always_checked=is_wrong or constraint.choices_by is not None,
        rules=tuple(rule for rule in rules if rule.other in names),
        rules_of_run=tuple(rule for rule in rules if rule.other not in names),
    )


@functools.cache
def _checked(config: type) -> tuple[_Option, ...]:
    return tuple(option for option in _options(config).values() if option.is_checked)


def neutral_values(config: type) -> dict[str, Any]:
    """Return the neutral values of the fields that have one."""
    neutral = {name: option.constraint.neutral for name, option in _options(config).items()}
    return {name: value for name, value in neutral.items() if value is not None}


def check_fields(config: object, group: str = "") -> None:
    """Raise UserError for a value that breaks its field's constraint.

    group: the dotted key of the config; "" for a run, of which it also checks the conditions between groups.
    """
    kind: type = type(config)
    values, prefix, checked = vars(config), f"{group}." if group else "", []
    for option in _checked(kind):
        value = values[option.name]
        if option.is_always_checked or not (value is option.default or value == option.default):
            _check_value(option, value, f"{prefix}{option.name}")
            checked.append(option)
    for option in checked:
        value, key = values[option.name], f"{prefix}{option.name}"
        if option.constraint.choices_by is not None:
            by, table = option.constraint.choices_by
            _check_choice(value, key, table, *_other(config, by, prefix))
        for rule in option.rules if option.is_given(value) else ():
            _check_rule(option, value, key, rule, *_other(config, rule.other, prefix))
    if not group:
        _check_groups(config, config, "")


def _check_value(option: _Option, value: Any, key: str) -> None:
    fault = option.constraint.fault(value) if value is not None else ErrorCode.malformed if option.is_text else None
    if fault is not None:
        shown_value = repr(value) if isinstance(value, str) else typed(value)
        allowed = option.constraint.allowed(option.takes_null)
        raise UserError(f"{key}={shortened(shown_value)} is not allowed: give {allowed}", fault, key)


def _check_groups(run: object, config: object, prefix: str) -> None:
    """Check the rules between the groups of a run."""
    for name, section in vars(config).items():
        if is_dataclass(section):
            kind: type = type(section)
            for option in _checked(kind):
                value, key = getattr(section, option.name), f"{prefix}{name}.{option.name}"
                for rule in option.rules_of_run if option.is_given(value) else ():
                    groups, _, other = rule.other.rpartition(".")
                    owner = functools.reduce(getattr, groups.split(".") if groups else [], run)
                    _check_rule(option, value, key, rule, *_other(owner, other, groups and f"{groups}."))
            _check_groups(run, section, f"{prefix}{name}.")


def _other(config: object, name: str, prefix: str) -> tuple[_Option, Any, str]:
    """Return another setting of a rule: its option, its value, and how it is typed."""
    kind: type = type(config)
    option = _options(kind)[name]
    return option, getattr(config, name), option.constraint.typed_as or f"{prefix}{name}"


def _check_choice(
    value: Any, key: str, table: Mapping[Any, tuple[Any, ...]], _by: _Option, actual: Any, other: str
) -> None:
    if value is not None and actual is not None and value not in table[actual]:
        allowed_choices = [typed(choice) for choice, allowed in table.items() if value in allowed]
        problem = f"{key}={typed(value)} is not allowed with {other}={typed(actual)}"
        remedy = f"give {_or(map(typed, table[actual]))}, or {other}={_or(allowed_choices)}"
        raise UserError(f"{problem}: {remedy}", ErrorCode.excludes, key)


def _check_rule(option: _Option, value: Any, key: str, rule: _Rule, by: _Option, actual: Any, other: str) -> None:
    """Check a rule of a given value with the setting `other` of the value `actual`."""
    condition = rule.condition
    holds = by.is_given(actual) if condition.values is None else actual in condition.values
    if holds is rule.must_hold:
        return
    key, value, unset = _changed(key, value, option.unset)
    reason = f", {condition.reason}" if condition.reason else ""
    state = f"{other}={shortened(typed(actual))}{reason}"
    if rule.must_hold and condition.values is not None:
        raise unused(key, value, unset, state, condition.give or f"{other}={_or(map(typed, condition.values))}")
    problem = f"{key}={shortened(typed(value))}"
    if rule.must_hold:
        remedy = f"give {other}={condition.give} too, or leave it at {typed(unset)}"
        raise UserError(f"{problem} needs {other}{reason}: {remedy}", ErrorCode.needs_other, key)
    is_wrong = condition.values is not None and by.unset in condition.values
    change = f"another {other}" if is_wrong else f"{other}={typed(by.unset)}"
    remedy = f"give {key}={typed(unset)}, or {condition.give or change}"
    raise UserError(f"{problem} is not allowed with {state}: {remedy}", ErrorCode.excludes, key)


def unused(key: str, value: Any, unset: Any, by: str, give: str) -> UserError:
    """Return the error for a setting that has no effect.

    by: the reason, such as `task=bench`; give: the setting that would make it effective. For a config, the error names
    the first changed setting.
    """
    key, value, unset = _changed(key, value, unset)
    problem = f"{key}={shortened(typed(value))} is not used by {by}"
    return UserError(f"{problem}: leave it at {typed(unset)}, or give {give}", ErrorCode.needs_other, key)


def _changed(key: str, value: Any, unset: Any) -> tuple[str, Any, Any]:
    """Return key, value and default of the first changed setting of a config; another setting unchanged."""
    if not is_dataclass(value):
        return key, value, unset
    pairs = ((name, field_value, getattr(unset, name)) for name, field_value in vars(value).items())
    name, field_value, default = next(pair for pair in pairs if pair[1] != pair[2])
    return _changed(f"{key}.{name}", field_value, default)


def typed(value: object) -> str:
    """Return a value as it is typed on the command line."""
    if isinstance(value, Enum):
        return value.name
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def _or(texts: Iterable[str]) -> str:
    *first, last = texts
    return f"{', '.join(first)} or {last}" if first else last
