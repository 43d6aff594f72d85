"""A tiny model whose heads have a size that vLLM's attention on a CPU has, and engines that generate with it."""

from __future__ import annotations

import gc

import attrs
import pytest
import torch

from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import EngineContext, ModelContext
from cosmos_core.testing.conformance.engine.subject import TINY, EngineDriver, Pricer, stopping_at

TOKENIZER = {"build": "byte-bpe", "vocab_size": 270, "split_digits": True}
TEXTS = ("Two and two", "Once upon a time there was", "x", "What is 6 times 7?", "A name")


def make_model(folder, **config):
    context = ModelContext(path=None, config={**TINY, "head_dim": 32, **config}, assets=folder)
    made = PluginSet.load([("model", "hf")]).create("model", "hf", {}, context)
    made.prepare(TEXTS, TOKENIZER)
    return made


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """The model, for the kit too, whose classes have a fixture `model` of their own."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def model(served):
    return served


@pytest.fixture(scope="session")
def pricer(model):
    return Pricer(model, seed=1)


def context_of(model):
    return EngineContext(
        model=stopping_at(model, frozenset()),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_in_flight=4,
        context_length=256,
        seed=1,
    )


@pytest.fixture(scope="session", autouse=True)
def nothing_imported_is_garbage(served):
    """vLLM collects garbage eight times from a start to an end; without all that it imports, that takes a sixth."""
    engine = PluginSet.load([("engine", "vllm")]).create("engine", "vllm", {}, context_of(served))
    engine.start()
    engine.shutdown()
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        # It freezes and unfreezes, too; what an engine leaves behind is garbage all the same.
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        yield
    gc.unfreeze()


@pytest.fixture
def context(model):
    return context_of(model)


@pytest.fixture
def start(context):
    """Start an engine, with options, and changes of the context as keywords."""
    started = []

    def begin(options=None, **changes):
        plugins = PluginSet.load([("engine", "vllm")])
        made = plugins.create("engine", "vllm", options or {}, attrs.evolve(context, **changes))
        engine = EngineDriver(made, timeout_s=120.0, start_timeout_s=300.0)
        started.append(engine)
        engine.start()
        return engine

    yield begin
    for engine in started:
        engine.shutdown()
