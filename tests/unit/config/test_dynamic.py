from types import SimpleNamespace
from typing import Literal

import attrs
import pytest
from attrs import validators as check

from cosmos_core.config.dynamic import DynamicKey, chosen, dynamic_keys, with_values
from cosmos_core.config.job import StageFacts
from cosmos_core.config.loading import recipe_from
from cosmos_core.config.schema import Recipe, option
from cosmos_core.config.structure import structure, unstructure
from cosmos_core.errors import ConfigError

RECIPE = {
    "run": {"name": "r", "steps": 3},
    "model": {"path": "somewhere"},
    "algorithm": {"plugin": "grpo", "options": {"clip_low": 0.1}},
    "policy": {"optimizer": {"lr": 1e-6}},
    "dataset": {"plugin": "jsonl"},
    "reward": [{"plugin": "math"}],
}


@attrs.frozen(kw_only=True)
class Options:
    share: float = option(0.2, help="h", validator=check.and_(check.ge(0.0), check.lt(1.0)), dynamic=True)
    bound: float | None = option(None, help="h", validator=check.optional(check.gt(1.0)), dynamic=True)
    number: int = option(3, help="h", validator=check.le(5), dynamic=True)
    way: str = option("a", help="h", validator=check.in_(("a", "b")), dynamic=True)
    kind: Literal["x", "y"] | None = option(None, help="h", dynamic=True)
    whether: bool = option(True, help="h", dynamic=True)
    still: float = option(1.0, help="h")
    warm: float = option(1.0, help="h", validator=check.ge(0.0), dynamic=check.ge(0.5))
    hot: float = option(
        1.0, help="h", validator=[check.gt(0.0), check.lt(9.0)], dynamic=check.and_(check.ge(0.01), check.le(2.0))
    )


KEYS = dynamic_keys(Options, Options(), "algorithm.options")


def test_a_class_says_which_of_its_keys_are_dynamic_and_what_they_may_become():
    allowed = {each.key.removeprefix("algorithm.options."): each.allowed for each in KEYS}
    assert allowed == {
        "share": "a number ≥ 0 and < 1",
        "bound": "a number > 1, or none",
        "number": "an integer ≤ 5",
        "way": 'one of "a", "b"',
        "kind": 'one of "x", "y", or none',
        "whether": "true or false",
        "warm": "a number ≥ 0.5",
        "hot": "a number ≥ 0.01 and ≤ 2",
    }


def test_keys_survive_the_jobs_file():
    facts = StageFacts(source="rollouts", dynamic=KEYS)
    assert structure(unstructure(facts), StageFacts) == facts


def test_keys_of_the_recipe():
    recipe = recipe_from(RECIPE)
    assert [each.key for each in dynamic_keys(Recipe, recipe, "")] == [
        "policy.optimizer.lr",
        "policy.optimizer.weight_decay",
        "policy.optimizer.clip_norm",
        "policy.checkpoint.interval",
        "rollout.sampling.temperature",
        "sync.max_staleness",
        "sync.interval",
        "evaluation.interval",
    ]


def test_values_are_taken_as_the_key_holds_them(subtests):
    for override, value in [
        ("share=0.5", 0.5),
        ("share=0", 0.0),
        ("bound=3", 3.0),
        ("bound=none", None),
        ("number=-2", -2),
        ("way=b", "b"),
        ('way="b"', "b"),
        ("whether=false", False),
    ]:
        with subtests.test(override=override):
            key = f"algorithm.options.{override.partition('=')[0]}"
            taken = chosen(KEYS, {}, [f"algorithm.options.{override}"])
            assert taken == {key: value}
            assert type(taken[key]) is type(value)


def test_what_cannot_be_is_refused_by_name(subtests):
    for override, told in [
        ("algorithm.options.share=1", "algorithm.options.share: expected a number ≥ 0 and < 1, got 1"),
        ("algorithm.options.share=nan", "expected a number ≥ 0 and < 1, got NaN"),
        ("algorithm.options.warm=inf", "expected a number ≥ 0.5, between ±9007199254740992, got Infinity"),
        (f"algorithm.options.warm={10**400}", "between ±9007199254740992, got an integer of 1329 bits"),
        (f"algorithm.options.warm=0x{10**5000:x}", "between ±9007199254740992, got an integer of 16610 bits"),
        (f"algorithm.options.warm={'9' * 5000}", 'algorithm.options.warm: expected a number ≥ 0.5, got "999'),
        (f"algorithm.options.warm={'[' * 5000}", "the value is not valid TOML"),
        (
            "algorithm.options.number=-99999999999999999999999",
            "expected an integer ≤ 5, between ±9007199254740992, got",
        ),
        ("algorithm.options.share=true", "expected a number ≥ 0 and < 1, got true"),
        ("algorithm.options.bound=1", "expected a number > 1, or none, got 1"),
        ("algorithm.options.number=2.0", "expected an integer ≤ 5, got 2.0"),
        ("algorithm.options.number=none", 'expected an integer ≤ 5, got "none"'),
        ("algorithm.options.way=c", 'expected one of "a", "b", got "c"'),
        ("algorithm.options.whether=1", "expected true or false, got 1"),
        ("algorithm.options.shard=1", "no dynamic key of this run; did you mean algorithm.options.share?"),
        (
            "policy.replicas=2",
            "policy.replicas: cannot change while the run goes on: replicas come with `cosmos replica`",
        ),
        ("reward.0.weight=2", "reward.0.weight: cannot change while the run goes on: what a run's weights and samples"),
        ("control.keys=x", "control.keys: cannot change while the run goes on: processes take it from the recipe when"),
        (
            "model.options.x=1",
            "model.options.x: cannot change while the run goes on: of plugins' options, only those of",
        ),
        ("warmup.optimizer.eps=2", "warmup.optimizer.eps: cannot change while the run goes on"),
        ("sync.interval=2", "sync.interval: cannot change in this run: it is in lockstep"),
        ("algorithm.options.share", "algorithm.options.share: expected KEY=VALUE"),
        ("=1", "=1: expected KEY=VALUE"),
        ("algorithm.options.way='", "the value is not valid TOML"),
    ]:
        with subtests.test(override=override):
            with pytest.raises(ConfigError) as caught:
                chosen(KEYS, {"sync.interval": "it is in lockstep"}, [override])
            assert told in str(caught.value)
            assert ("dynamic in this run are" in str(caught.value)) == ("cannot change" in told)


def test_everything_wrong_is_told_at_once_and_a_key_is_set_once():
    with pytest.raises(ConfigError) as caught:
        chosen(
            KEYS, {}, ["algorithm.options.number=9", "nothing=1", "algorithm.options.way=a", "algorithm.options.way=b"]
        )
    everything = ", ".join(sorted(each.key for each in KEYS))
    assert str(caught.value).count("\n") == 2
    assert f"\nnothing: no dynamic key of this run; allowed: {everything}\n" in str(caught.value)
    assert "algorithm.options.way: given twice" in str(caught.value)
    with pytest.raises(ConfigError, match="nothing to set"):
        chosen(KEYS, {}, [])


def test_what_cannot_be_told_as_plain_data_is_not_dynamic(subtests):
    for annotation, validator, told in [
        (tuple[float, float], None, "a truth value, a number or a string"),
        (float | str, None, "one type of value"),
        (float, lambda *_: None, "use ge, gt, le, lt, in_, optional and and_"),
    ]:
        with subtests.test(annotation=annotation):
            cls = attrs.make_class(
                "Strange",
                {"key": attrs.field(default=None, type=annotation, validator=validator, metadata={"dynamic": True})},
            )
            with pytest.raises(TypeError, match=told):
                dynamic_keys(cls, SimpleNamespace(key=None), "algorithm.options")


def test_values_make_another_recipe_and_leave_the_first_as_it_is():
    plain = unstructure(recipe_from(RECIPE))
    values = {"algorithm.options.clip_low": 0.3, "policy.optimizer.lr": 0.5, "algorithm.options.new": None}
    changed = recipe_from(with_values(plain, values))
    assert changed.algorithm.options == {"clip_low": 0.3, "new": None}
    assert changed.policy.optimizer.lr == 0.5
    assert recipe_from(plain) == recipe_from(RECIPE)


def test_a_bound_at_the_edge():
    key = DynamicKey(key="k", type="number", value=1.0, at_least=0.0, above=None, at_most=2.0, below=None)
    assert [key.taken(value) for value in (0, 2.0)] == [0.0, 2.0]
    for value in (-1e-9, 2.000001, float("inf"), "1"):
        with pytest.raises(ConfigError):
            key.taken(value)
