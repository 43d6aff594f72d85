import tomllib

from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_core.config.loading import dump_recipe, recipe_from

BASE = {
    "run": {"name": "a", "steps": 3},
    "model": {"path": "m"},
    "algorithm": {"plugin": "grpo"},
    "policy": {"optimizer": {"lr": 1e-6}},
    "dataset": {"plugin": "arithmetic"},
}
SCALARS = (
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
VALUES = st.recursive(SCALARS, lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(), each, max_size=3))


def reloaded(recipe):
    return recipe_from(tomllib.loads(dump_recipe(recipe)))


def test_the_dump_has_the_defaults_and_leaves_out_what_has_no_value():
    dumped = tomllib.loads(dump_recipe(recipe_from(BASE)))
    assert dumped["policy"]["optimizer"]["lr"] == 1e-6
    assert "config" not in dumped["model"]
    assert "warmup" not in dumped


def test_sync_mode_survives_its_dump():
    recipe = recipe_from({**BASE, "sync": {"mode": "sync"}})
    assert reloaded(recipe) == recipe


def test_a_full_recipe_survives_its_dump():
    recipe = recipe_from(
        {
            **BASE,
            "model": {"config": {"layers": [1, {"x": 1.5}]}, "tokenizer": {"vocab_size": 300}},
            "reward": [{"plugin": "a", "options": {"deep": {"er": [1]}}}, {"plugin": "b"}],
            "warmup": {"plugin": "sft", "steps": 2, "optimizer": {"lr": 5e-3}},
            "tracking": {"hooks": ["mlflow"], "options": {"mlflow": {"uri": "x"}}},
        }
    )
    assert reloaded(recipe) == recipe


@settings(max_examples=60)
@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_any_options_survive_the_dump(options):
    recipe = recipe_from({**BASE, "algorithm": {"plugin": "grpo", "options": options}})
    assert reloaded(recipe) == recipe
