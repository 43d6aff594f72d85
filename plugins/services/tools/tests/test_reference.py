from typing import Literal

import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_service_tools.reference import Key, keys


@attrs.frozen(kw_only=True)
class Inner:
    deep: float = option(0.5, help="How deep.", validator=check.and_(check.gt(0.0), check.le(1.0)))


@attrs.frozen(kw_only=True)
class Options:
    length: int = option(help="How long.", validator=check.ge(1))
    mode: Literal["a", "b"] = option("a", help="Which.")
    kind: Literal["a", "b"] = option("a", help="Told once.", validator=check.in_(("a", "b")))
    cap: float | None = option(None, help="At most.", validator=check.optional(check.gt(1.0)))
    name: str = option("required", help="A name.", validator=check.matches_re("[a-z]+"))
    words: tuple[str, ...] = option(("x", "y"), help="Words.", validator=check.min_len(1))
    extra: dict = option(factory=dict, help="More.")
    size: int = attrs.field(default=2, validator=check.in_([2, 4]))
    inner: Inner = option(factory=Inner, help="A table.")


def test_every_key_is_described():
    rows = {key.name: (key.type, key.bounds, key.default, key.help) for key in keys(Options)}
    assert rows == {
        "length": ("an integer", "≥ 1", "required", "How long."),
        "mode": ('one of "a", "b"', "", '"a"', "Which."),
        "kind": ('one of "a", "b"', "", '"a"', "Told once."),
        "cap": ("a number", "> 1", "none", "At most."),
        "name": ("a string", "matches [a-z]+", '"required"', "A name."),
        "words": ("an array", "length ≥ 1", "x, y", "Words."),
        "extra": ("a table", "", "{}", "More."),
        "size": ("an integer", "one of 2, 4", "2", ""),
        "inner.deep": ("a number", "> 0, ≤ 1", "0.5", "How deep."),
    }


def test_only_what_has_no_default_is_required():
    assert [key.name for key in keys(Options) if key.is_required] == ["length"]


def test_a_default_that_depends_on_others_is_computed():
    @attrs.frozen(kw_only=True)
    class Sized:
        size: int = 1
        half: int = attrs.field(default=attrs.Factory(lambda self: self.size // 2, takes_self=True))

    assert keys(Sized)[1] == Key(name="half", type="an integer", bounds="", default="computed", help="")
