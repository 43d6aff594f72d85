"""The engine of a recipe is asked of a run before any process starts."""

import attrs
import pytest

from cosmos_core.config.loading import recipe_from
from cosmos_core.config.schema import option
from cosmos_core.errors import ConfigError, EngineError, PluginBrokenError
from cosmos_core.protocols import Foresight, ModelFacts, Provider
from cosmos_core.run.planning import preflight as foresight

FACTS = ModelFacts(
    architecture="Tiny",
    num_parameters=1,
    num_layers=1,
    hidden_size=8,
    vocab_size=300,
    tokenizer_size=300,
    context_length=256,
    stop_ids=frozenset({2}),
    pad_id=0,
)
RECIPE = {
    "run": {"name": "demo", "steps": 6},
    "model": {"plugin": "hf", "config": {"model_type": "qwen3"}},
    "algorithm": {"plugin": "grpo"},
    "dataset": {"plugin": "numbers"},
}
MODEL = object()


@attrs.frozen(kw_only=True)
class Options:
    slots: int = option(4, help="How many.")


class Plugins:
    def __init__(self, foresee):
        self.foresee = foresee

    def provider(self, kind, name):
        assert (kind, name) == ("engine", "made")
        return Provider(create=dict, options=Options, foresee=self.foresee)


@pytest.fixture
def ask(monkeypatch):
    monkeypatch.setattr(foresight, "visible_gpus", lambda: ["0"])

    def asked(foresee, **rollout):
        engine = {"plugin": "made", **rollout.pop("engine", {})}
        recipe = recipe_from({**RECIPE, "rollout": {"engine": engine, **rollout}})
        return foresight.foresee(recipe, Plugins(foresee), MODEL, FACTS, shows_media=True)

    return asked


def test_it_is_told_what_the_recipe_says(ask):
    seen = []

    def foresee(options, outlook):
        seen.append((options, outlook))
        return Foresight(absent="x")

    engine = {"options": {"slots": 9}}
    assert ask(foresee, engine=engine, precision="fp32", sampling={"temperature": 0.6}) == Foresight(absent="x")
    ((options, outlook),) = seen
    assert options == Options(slots=9)
    assert (outlook.model, outlook.facts) == (MODEL, FACTS)
    assert (outlook.device, outlook.has_gpu, outlook.precision) == ("auto", True, "float32")
    assert (outlook.temperatures, outlook.shows_media) == ({"rollout.sampling.temperature": 0.6}, True)
    assert outlook.num_ranks == 1


def test_an_engine_that_foresees_nothing_refuses_nothing(ask):
    assert ask(None) == Foresight()


def test_a_wrong_option_is_told_by_its_key(ask):
    with pytest.raises(ConfigError, match=r"rollout\.engine\.options\.slot"):
        ask(lambda *_: Foresight(), engine={"options": {"slot": 9}})


def test_an_engine_that_breaks_is_named(ask):
    for foresee, message in [
        (lambda *_: ["no"], r"engine plugin 'made': foresee\(\) returned \['no'\], which is no Foresight"),
        (lambda *_: 1 / 0, r"engine plugin 'made': foresee\(\) failed: ZeroDivisionError"),
    ]:
        with pytest.raises(PluginBrokenError, match=message):
            ask(foresee)


def test_what_an_engine_says_itself_stays(ask):
    def foresee(options, outlook):
        raise EngineError("install it")

    with pytest.raises(EngineError, match=r"^install it$"):
        ask(foresee)
