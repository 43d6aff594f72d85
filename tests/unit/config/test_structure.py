import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest

from cosmos_core.config import Recipe, option
from cosmos_core.config.structure import check_class, structure, unstructure
from cosmos_core.errors import ConfigError


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@attrs.frozen(kw_only=True)
class Inner:
    size: int = option(help="How big.", validator=attrs.validators.ge(1))
    ratio: float = 0.5


@attrs.frozen(kw_only=True)
class Options:
    epsilon_low: float = option(0.2, help="Lower.", validator=attrs.validators.ge(0.0))
    epsilon_high: float = option(0.2, help="Upper.")
    mode: Literal["fast", "slow"] = "fast"
    flag: bool = False
    name: str | None = None
    cap: float | Literal["off"] = "off"
    pair: tuple[int, float] = (1, 2.0)
    many: tuple[str, ...] = ()
    tags: frozenset[str] = frozenset()
    free: Mapping[str, Any] = attrs.field(factory=dict)
    colour: Colour = Colour.RED
    where: Path = Path()
    inner: Inner = attrs.field(factory=lambda: Inner(size=1))
    inners: tuple[Inner, ...] = ()

    @epsilon_high.validator
    def _is_ordered(self, attribute, value):
        if value < self.epsilon_low:
            raise ValueError(f"must be at least epsilon_low = {self.epsilon_low}")


def error_of(data: Any, cls: type = Options) -> str:
    with pytest.raises(ConfigError) as caught:
        structure(data, cls, "algorithm.options")
    return str(caught.value)


def test_an_unknown_option_names_its_path_and_the_nearest_name():
    assert error_of({"epsilon_lwo": 0.9}) == "algorithm.options.epsilon_lwo: unknown option; did you mean epsilon_low?"


def test_an_option_like_none_lists_what_is_allowed():
    assert error_of({"inner": {"size": 1, "zzz": 1}}) == (
        "algorithm.options.inner.zzz: unknown option; allowed: ratio, size"
    )


def test_wrong_values_are_refused_with_path_value_and_what_is_allowed(subtests):
    for data, message in [
        ({"inner": {"size": "12"}}, 'inner.size: expected an integer, got "12"'),
        ({"inner": {"size": 3.0}}, "inner.size: expected an integer, got 3.0"),
        ({"inner": {"size": True}}, "inner.size: expected an integer, got true"),
        ({"inner": {"size": 0}}, "inner.size: must be >= 1, got 0"),
        ({"inner": {}}, "inner.size: required, but not given. How big."),
        ({"inner": 3}, "inner: expected a table, got 3"),
        ({"inners": [{"size": 1}, {"size": 0}]}, "inners.1.size: must be >= 1, got 0"),
        ({"epsilon_low": True}, "epsilon_low: expected a number, got true"),
        ({"epsilon_low": float("nan")}, "epsilon_low: expected a finite number, got NaN"),
        ({"epsilon_low": 10**400}, "epsilon_low: expected a finite number"),
        ({"epsilon_high": 0.1}, "epsilon_high: must be at least epsilon_low"),
        ({"mode": "fats"}, 'mode: expected one of "fast", "slow", got "fats"; did you mean "fast"?'),
        ({"mode": 1}, 'mode: expected one of "fast", "slow", got 1'),
        ({"flag": 1}, "flag: expected true or false, got 1"),
        ({"name": 1}, "name: expected a string, got 1"),
        ({"cap": "of"}, 'cap: expected a number or one of "off", got "of"'),
        ({"pair": [1]}, "pair: expected an array of 2 values, got [1]"),
        ({"pair": "ab"}, 'pair: expected an array, got "ab"'),
        ({"many": ["a", 2]}, "many.1: expected a string, got 2"),
        ({"free": {"a": [1, float("inf")]}}, "free.a.1: expected a finite number, got Infinity"),
        ({"colour": "green"}, 'colour: expected one of "red", "blue", got "green"'),
        ({"where": 1}, "where: expected a path (a string), got 1"),
    ]:
        with subtests.test(data=data):
            assert error_of(data).startswith(f"algorithm.options.{message}")


def test_a_validator_that_names_its_option_is_not_told_twice():
    @attrs.frozen(kw_only=True)
    class Named:
        pattern: str = attrs.field(default="")

        @pattern.validator
        def _is_pattern(self, attribute, value):
            raise ValueError(f"{attribute.name}: {value!r} is no pattern")

    assert error_of({"pattern": "("}, Named) == "algorithm.options.pattern: '(' is no pattern"


def test_every_problem_is_reported_at_once():
    lines = error_of({"flag": 1, "inner": {"size": 0, "ratio": "x"}, "many": [1, 2], "nope": 1}).splitlines()
    assert {line.partition(": ")[0].removeprefix("algorithm.options.") for line in lines} == {
        "flag",
        "inner.size",
        "inner.ratio",
        "many.0",
        "many.1",
        "nope",
    }


def test_validators_of_good_fields_run_beside_bad_ones():
    assert len(error_of({"epsilon_low": -1, "flag": 3}).splitlines()) == 2


def test_a_validator_that_needs_a_bad_field_leaves_the_report_to_that_field():
    assert error_of({"epsilon_low": "x", "epsilon_high": 0.1}) == (
        'algorithm.options.epsilon_low: expected a number, got "x"'
    )


def test_a_check_after_construction_is_a_config_error():
    @attrs.frozen(kw_only=True)
    class Paired:
        low: int = 1
        high: int = 2

        def __attrs_post_init__(self) -> None:
            if self.low > self.high:
                raise ValueError("low is above high")

    assert error_of({"low": 3}, Paired) == "algorithm.options: low is above high"


def test_good_values_of_every_shape():
    data = {
        "epsilon_low": 0,
        "name": None,
        "cap": 3,
        "pair": [2, 3],
        "many": ["a"],
        "tags": ["y", "x"],
        "free": {"a": [1, {"b": None}]},
        "colour": "blue",
        "where": "a/b",
        "inners": [{"size": 2}],
    }
    options = structure(data, Options)
    assert options == Options(
        epsilon_low=0.0,
        cap=3.0,
        pair=(2, 3.0),
        many=("a",),
        tags=frozenset("xy"),
        free={"a": [1, {"b": None}]},
        colour=Colour.BLUE,
        where=Path("a/b"),
        inners=(Inner(size=2),),
    )
    assert type(options.epsilon_low) is float
    assert structure(unstructure(options), Options) == options
    assert unstructure(options)["tags"] == ["x", "y"]


def test_a_recipe_survives_the_way_to_plain_data_and_back():
    recipe = structure(
        {
            "run": {"name": "a", "steps": 3},
            "model": {"config": {"hidden_size": 8}, "tokenizer": {}},
            "algorithm": {"plugin": "grpo", "options": {"x": [1, 2.5, "s"]}},
            "policy": {"optimizer": {"lr": 1e-6}},
            "dataset": {"plugin": "arithmetic"},
            "reward": [{"plugin": "math", "weight": 2}],
            "warmup": {"optimizer": {"lr": 1e-6}, "plugin": "sft", "steps": 2},
        },
        Recipe,
    )
    assert structure(unstructure(recipe), Recipe) == recipe
    assert recipe.reward[0].weight == 2.0


def test_a_class_that_a_recipe_cannot_express_is_found_before_use():
    @attrs.frozen
    class Odd:
        value: complex

    check_class(Options)
    with pytest.raises(TypeError, match="complex"):
        check_class(Odd)
    with pytest.raises(TypeError, match="no attrs class"):
        check_class(dict)
