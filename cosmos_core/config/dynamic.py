"""Mutability of keys: those that may change while a run goes on, those that may when it goes on again, and to what.

A field declares itself with `option(..., dynamic=True)`. What it allows is written down as plain data, so that who
checks a change need not have the class: the controller imports no plugin.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import ge, gt, le, lt
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeAlias, Union, get_args, get_origin

import attrs

from cosmos_core.config.overrides import parse_value
from cosmos_core.config.problems import show, suggestion
from cosmos_core.config.schema import Recipe
from cosmos_core.config.structure import fields, unstructure
from cosmos_core.errors import ConfigError
from cosmos_core.types import Scalar

LAYOUT: Final = ("policy.mesh", "policy.parallel", "policy.micro_batch_units")
"""How a replica spreads its work; whether the model can be spread so is to be asked again."""

TRAVEL: Final = ("sync.transport", "sync.directory", "sync.fan_out", "sync.relay_timeout_s", "sync.delta")
"""How weights reach rollout replicas; whether they can is to be asked again, too."""

CHANGEABLE: Final = (
    "run.steps",
    "evaluation.interval",
    *LAYOUT,
    "policy.checkpoint.interval",
    "policy.checkpoint.keep",
    *TRAVEL,
    "samples",
    "tracking",
    "control",
    "launch",
)
"""Keys, and tables of which every key, that `cosmos run --resume RUN --set KEY=VALUE` may change."""

_OTHERWISE: Final = (
    (("policy.replicas", "rollout.replicas"), "replicas come with `cosmos replica`, and go with `cosmos drain`"),
    (("rollout.sampling.top_p", "rollout.sampling.top_k"), "a run that trains draws from the whole vocabulary"),
    (("policy", "rollout", "sync", "warmup.optimizer"), "replicas are made with it when they start"),
)


def is_in(key: str, tables: Sequence[str]) -> bool:
    """True if a key is one of some, or in one of some tables."""
    return any(key == table or key.startswith(f"{table}.") for table in tables)


def reason(key: str) -> str:
    """Say why a key of the recipe that is not dynamic stays as it is, and what can be done instead."""
    if is_in(key, CHANGEABLE):
        return "processes take it from the recipe when they start; `cosmos run --resume RUN --set KEY=VALUE` changes it"
    for tables, why in _OTHERWISE:
        if is_in(key, tables):
            return why
    return "what a run's weights and samples come from stays as it is"


ValueType: TypeAlias = Literal["boolean", "integer", "number", "text"]

_TYPES: Final[Mapping[Any, ValueType]] = {bool: "boolean", int: "integer", float: "number", str: "text"}
_SIGNS: Final = {ge: "≥", gt: ">", le: "≤", lt: "<"}
_BOUNDS: Final = {"≥": "at_least", ">": "above", "≤": "at_most", "<": "below"}
_LARGEST: Final = 2**53
"""Magnitude of a number up to which every integer is a float, too; the journal could not hold much larger integers."""
_STAGES: Final = ("algorithm", "warmup")
"""Tables whose plugins' options may be dynamic."""
_WORDS: Final = {"boolean": "true or false", "integer": "an integer", "number": "a number", "text": "a string"}


@attrs.frozen(kw_only=True)
class DynamicKey:
    """A key that may change while a run goes on.

    Attributes:
        key: Its path in the recipe.
        type: What it holds; an integer may stand for a number.
        optional: Whether it may be absent; `none` says so.
        choices: What a text may be; anything if there are none.
        above: What a number must be greater than.
        below: What a number must be less than.
    """

    key: str
    type: ValueType
    value: Scalar
    optional: bool = False
    choices: tuple[str, ...] = ()
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    @property
    def allowed(self) -> str:
        """The values that it may become, for people."""
        bounds = [
            f"{sign} {bound:g}"
            for sign, bound in (("≥", self.at_least), (">", self.above), ("≤", self.at_most), ("<", self.below))
            if bound is not None
        ]
        what = f"one of {', '.join(map(show, self.choices))}" if self.choices else _WORDS[self.type]
        return f"{' '.join([what, ' and '.join(bounds)]).strip()}{', or none' if self.optional else ''}"

    def taken(self, value: Any) -> Scalar:
        """A value as the key holds it."""
        if self.optional and (value is None or value == "none"):
            return None
        if isinstance(value, int | float) and abs(value) > _LARGEST:
            seen = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else show(value)
            raise ConfigError(f"{self.key}: expected {self.allowed}, between ±{_LARGEST}, got {seen}")
        taken = float(value) if self.type == "number" and type(value) is int else value
        if _TYPES.get(type(taken)) != self.type or not self._is_within(taken):
            raise ConfigError(f"{self.key}: expected {self.allowed}, got {show(value)}")
        scalar: Scalar = taken
        return scalar

    def _is_within(self, value: Any) -> bool:
        if self.type == "text":
            return not self.choices or value in self.choices
        return math.isfinite(value) and all(
            bound is None or compare(value, bound)
            for compare, bound in ((ge, self.at_least), (gt, self.above), (le, self.at_most), (lt, self.below))
        )


def dynamic_keys(cls: type, values: Any, prefix: str) -> tuple[DynamicKey, ...]:
    """The keys of an attrs class, and of those nested in it at the path `prefix`, that declare themselves dynamic.

    A TypeError says that what one may become cannot be written down as plain data.
    """
    found = []
    for name, field in fields(cls):
        if declared := field.metadata.get("dynamic"):
            value = values
            for part in name.split("."):
                value = getattr(value, part)
            found.append(_described(f"{prefix}.{name}" if prefix else name, field, unstructure(value), declared))
    return tuple(found)


def chosen(keys: Sequence[DynamicKey], fixed: Mapping[str, str], overrides: Iterable[str]) -> dict[str, Scalar]:
    """The values that `KEY=VALUE`s ask for, by key; they are as in TOML, and what is not TOML is a string.

    `fixed` are keys that declare themselves dynamic and cannot change in this run, and why. A ConfigError lists
    everything that is wrong: the key, the value seen, what is allowed, the nearest name.
    """
    known = {each.key: each for each in keys}
    values: dict[str, Scalar] = {}
    problems = []
    is_list_needed = False
    for override in overrides:
        name, separator, text = override.partition("=")
        key = name.strip()
        if not (separator and key):
            problems.append(f"{override}: expected KEY=VALUE, for example policy.optimizer.lr=5e-7")
        elif key in values:
            problems.append(f"{key}: given twice")
        elif key in known:
            try:
                values[key] = known[key].taken(parse_value(text.strip(), override))
            except ConfigError as error:
                problems.append(str(error))
        elif why := _static(key, fixed):
            problems.append(f"{key}: cannot change {why}")
            is_list_needed = True
        else:
            problems.append(f"{key}: no dynamic key of this run; {suggestion(key, known)}")
    if not values and not problems:
        problems.append("nothing to set; give KEY=VALUE, for example policy.optimizer.lr=5e-7")
    if is_list_needed:
        problems.append(f"dynamic in this run are {', '.join(sorted(known)) or 'none'}")
    if problems:
        raise ConfigError("\n".join(problems))
    return values


def with_values(recipe: Mapping[str, Any], values: Mapping[str, Scalar]) -> dict[str, Any]:
    """A recipe as plain data with other values of dynamic keys; the given one stays as it is."""
    changed = dict(recipe)
    for key, value in values.items():
        *above, last = key.split(".")
        table = changed
        for part in above:
            table[part] = dict(table[part])
            table = table[part]
        table[last] = value
    return changed


def _static(key: str, fixed: Mapping[str, str]) -> str:
    """Say when a key of the recipe cannot change, and why; empty if there is no such key."""
    if key in fixed:
        return f"in this run: {fixed[key]}"
    if _is_of_recipe(key.split("."), Recipe):
        return f"while the run goes on: {reason(key)}"
    table, _, option = key.partition(".options.")
    if option and table not in _STAGES and _is_of_recipe([*table.split("."), "options"], Recipe):
        return "while the run goes on: of plugins' options, only those of algorithms may"
    return ""


def _is_of_recipe(path: Sequence[str], annotation: Any) -> bool:
    """True if a path leads through tables of the recipe to a key; what is in a plugin's own options is not known."""
    if not path:
        return True
    for member in (annotation, *get_args(annotation)):
        if isinstance(member, type) and attrs.has(member):
            own = {field.name: field.type for field in attrs.fields(attrs.resolve_types(member))}
            if path[0].isdecimal() and member is not annotation:
                return _is_of_recipe(path[1:], member)
            return path[0] in own and _is_of_recipe(path[1:], own[path[0]])
    return False


def _described(key: str, field: attrs.Attribute[Any], value: Any, declared: Any) -> DynamicKey:
    members = get_args(field.type) if get_origin(field.type) in (Union, UnionType) else (field.type,)
    plain = [member for member in members if member is not NoneType]
    if len(plain) != 1:
        raise TypeError(f"{key}: a dynamic key holds one type of value, not {field.type!r}")
    limits: dict[str, Any] = {}
    choices: tuple[Any, ...] = ()
    if get_origin(plain[0]) is Literal:
        choices = get_args(plain[0])
        plain = [str]
    if plain[0] not in _TYPES:
        raise TypeError(f"{key}: a dynamic key holds a truth value, a number or a string, not {field.type!r}")
    # Of two bounds of one kind, the last.
    for kind, limit in (*demands(field.validator), *demands(None if declared is True else declared)):
        if kind == "one of":
            choices = limit
        elif kind in _BOUNDS:
            limits[_BOUNDS[kind]] = float(limit)
        else:
            raise TypeError(
                f"{key}: what {kind or limit!r} demands of a dynamic key cannot be told to a process without its "
                "class; use ge, gt, le, lt, in_, optional and and_ of attrs.validators"
            )
    # What the narrower one of two bounds says besides.
    if limits.get("above", math.inf) < limits.get("at_least", -math.inf):
        del limits["above"]
    if limits.get("below", -math.inf) > limits.get("at_most", math.inf):
        del limits["below"]
    return DynamicKey(key=key, type=_TYPES[plain[0]], value=value, optional=len(members) > 1, choices=choices, **limits)


def demands(validator: Any) -> Iterator[tuple[str, Any]]:
    """(kind, value) of what validators of attrs demand, such as `("≥", 1)`; another validator is of the empty kind."""
    if hasattr(validator, "_validators"):
        for each in validator._validators:  # noqa: SLF001 - attrs gives no other way to look into `and_`
            yield from demands(each)
    elif hasattr(validator, "compare_func"):
        yield _SIGNS[validator.compare_func], validator.bound
    elif hasattr(validator, "pattern"):
        yield "matches", validator.pattern.pattern
    elif hasattr(validator, "min_length"):
        yield "length ≥", validator.min_length
    elif hasattr(validator, "options"):
        yield "one of", tuple(validator.options)
    elif hasattr(validator, "validator"):
        yield from demands(validator.validator)
    elif validator is not None:
        yield "", validator
