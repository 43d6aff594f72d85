"""The engine of a recipe is asked of a run before any process starts."""

import attrs
import pytest

from cosmos_core.config.loading import recipe_from
from cosmos_core.config.schema import option
from cosmos_core.errors import ConfigError, EngineError, PluginBrokenError
from cosmos_core.protocols import AlgorithmCapabilities, ModelFacts, Preflight, Provider
from cosmos_core.run.planning import preflight as planning

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
    "policy": {"optimizer": {"lr": 1e-6}},
    "dataset": {"plugin": "numbers"},
}
MODEL = object()


@attrs.frozen(kw_only=True)
class Options:
    slots: int = option(4, help="How many.")


class Plugins:
    def __init__(self, preflight, source):
        self.preflight, self.source = preflight, source

    def provider(self, kind, name):
        if kind == "algorithm":
            return Provider(create=dict, capabilities=AlgorithmCapabilities(source=self.source))
        assert (kind, name) == ("engine", "made")
        return Provider(create=dict, options=Options, preflight=self.preflight)


@pytest.fixture
def ask(monkeypatch):
    monkeypatch.setattr(planning, "visible_gpus", lambda: ["0"])

    def asked(preflight, source="rollouts", **rollout):
        engine = {"plugin": "made", **rollout.pop("engine", {})}
        recipe = recipe_from({**RECIPE, "rollout": {"engine": engine, **rollout}})
        return planning.engine_preflight(recipe, Plugins(preflight, source), MODEL, FACTS, shows_media=True)

    return asked


def test_an_engine_is_told_what_the_recipe_says(ask):
    # It is told what the recipe says.
    seen = []

    def preflight(options, planned):
        seen.append((options, planned))
        return Preflight(absent="x")

    engine = {"options": {"slots": 9}}
    assert ask(preflight, engine=engine, precision="fp32", sampling={"temperature": 0.6}) == Preflight(absent="x")
    ((options, planned),) = seen
    assert options == Options(slots=9)
    assert (planned.model, planned.facts) == (MODEL, FACTS)
    assert (planned.device, planned.has_gpu, planned.precision) == ("auto", True, "float32")
    assert (planned.temperatures, planned.shows_media) == ({"rollout.sampling.temperature": 0.6}, True)
    assert planned.num_ranks == 1

    assert "rollout.sampling" in planned.samplings

    # Where demonstrations alone are trained on, it draws no rollouts.
    ask(preflight, source="demonstrations")
    assert (seen[1][1].temperatures, seen[1][1].samplings) == ({}, {})

    # An engine without a preflight refuses nothing.
    assert ask(None) == Preflight()


def test_what_an_engine_says_wrongly_is_told(ask):
    # An engine that breaks is named.
    for preflight, message in [
        (lambda *_: ["no"], r"engine plugin 'made': preflight\(\) returned \['no'\], which is no Preflight"),
        (lambda *_: 1 / 0, r"engine plugin 'made': preflight\(\) failed: ZeroDivisionError"),
    ]:
        with pytest.raises(PluginBrokenError, match=message):
            ask(preflight)

    # What an engine says itself stays.
    def preflight(options, planned):
        raise EngineError("install it")

    with pytest.raises(EngineError, match=r"^install it$"):
        ask(preflight)

    # A wrong option is told by its key.
    with pytest.raises(ConfigError, match=r"rollout\.engine\.options\.slot"):
        ask(lambda *_: Preflight(), engine={"options": {"slot": 9}})
