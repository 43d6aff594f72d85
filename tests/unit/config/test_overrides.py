import pytest

from cosmos_core.config.overrides import apply_override, apply_selections
from cosmos_core.errors import ConfigError


def applied(override: str, data: dict | None = None) -> dict:
    data = {} if data is None else data
    apply_override(data, override)
    return data


def test_values_are_toml_and_bare_words_are_strings(subtests):
    for text, value in [
        ("2", 2),
        ("1e-3", 1e-3),
        ("true", True),
        ("True", "True"),
        ("grpo", "grpo"),
        ("/data/x y.jsonl", "/data/x y.jsonl"),
        ("a=b", "a=b"),
        ('"12"', "12"),
        ("[1, 2]", [1, 2]),
        ('{plugin = "x"}', {"plugin": "x"}),
        ("2024-01-01", "2024-01-01"),
        ("1\nother = 2", "1\nother = 2"),
        ("", ""),
    ]:
        with subtests.test(text=text):
            assert applied(f"a.b={text}") == {"a": {"b": value}}


def test_an_index_reaches_into_an_array():
    data = {"reward": [{"plugin": "a"}, {"plugin": "b"}]}
    assert applied("reward.1.weight=2", data)["reward"] == [{"plugin": "a"}, {"plugin": "b", "weight": 2}]


def test_a_quoted_part_may_hold_a_dot():
    assert applied('tracking.options."my.hook".x=1') == {"tracking": {"options": {"my.hook": {"x": 1}}}}


def test_malformed_overrides_are_refused(subtests):
    for override, data, message in [
        ("policy.replicas", {}, "expected KEY=VALUE"),
        ("=1", {}, "is no key"),
        ("a..b=1", {}, "is no key"),
        ("a=[1,", {}, "not valid TOML"),
        ("run.seed.x=1", {"run": {"seed": 3}}, "run.seed is 3, which has no key 'x'"),
        ("reward.2.weight=1", {"reward": [{}]}, "reward.2 does not exist|reward does not exist|from 0 to 0"),
        ("reward.first.weight=1", {"reward": [{}]}, "from 0 to 0"),
        ("reward.0.weight=1", {}, "reward has no entries"),
        ("reward.0.weight=1", {"reward": []}, "the array is empty"),
    ]:
        with subtests.test(override=override):
            with pytest.raises(ConfigError, match=message) as caught:
                apply_override(data, override)
            assert override in str(caught.value)


def test_selecting_another_plugin_leaves_the_other_plugins_options_behind():
    data = {"algorithm": {"plugin": "grpo", "options": {"x": 1}}, "model": {"plugin": "hf", "path": "p"}}
    apply_selections(data, {"algorithm": "sft", "model": "qwen"})
    assert data == {"algorithm": {"plugin": "sft"}, "model": {"plugin": "qwen", "path": "p"}}


def test_selecting_the_same_plugin_changes_nothing():
    data = {"algorithm": {"plugin": "grpo", "options": {"x": 1}}}
    apply_selections(data, {"algorithm": "grpo"})
    assert data == {"algorithm": {"plugin": "grpo", "options": {"x": 1}}}


def test_selected_rewards_take_the_place_of_the_recipes():
    data = {"reward": [{"plugin": "math", "weight": 2.0}, {"plugin": "length"}]}
    apply_selections(data, {"reward": "math, style"})
    assert data["reward"] == [{"plugin": "math", "weight": 2.0}, {"plugin": "style"}]


def test_an_environment_is_selected_like_any_other_plugin():
    data = {"environment": {"plugin": "game", "max_turns": 3, "options": {"x": 1}}}
    apply_selections(data, {"environment": "calculator"})
    assert data == {"environment": {"plugin": "calculator", "max_turns": 3}}


def test_bad_selections_are_refused(subtests):
    for selections, message in [
        ({"datset": "x"}, "did you mean dataset"),
        ({"model": " "}, "--model"),
        ({"reward": "a,,b"}, "--reward"),
    ]:
        with subtests.test(selections=selections), pytest.raises(ConfigError, match=message):
            apply_selections({}, selections)
