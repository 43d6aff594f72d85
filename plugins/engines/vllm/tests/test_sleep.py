"""The calls that vLLM gets of an engine that sleeps; a stand-in takes them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cosmos_core.errors import EngineError
from cosmos_core.protocols import EngineContext
from cosmos_core.rollout.serving.updates import Update
from cosmos_engine_vllm import engine as module
from cosmos_engine_vllm.backend import Backend
from cosmos_engine_vllm.engine import VllmEngine
from cosmos_engine_vllm.options import VllmOptions
from cosmos_engine_vllm.shares import SharedUpdate


class Tiny(nn.Module):
    """The model, as the trainer has it."""

    def get_input_embeddings(self):
        return nn.Embedding(5, 2)


class Llm:
    """vLLM's own engine, as far as sleep goes."""

    def __init__(self, calls):
        self.calls = calls
        self.engine_core = SimpleNamespace(shutdown=lambda: None)

    def sleep(self, level, mode):
        self.calls.append(f"sleep {level} {mode}")

    def wake_up(self):
        self.calls.append("wake")

    def reset_encoder_cache(self):
        self.calls.append("forget what was seen")


class Served(Backend):
    """A backend over that."""

    workers = SimpleNamespace(close=lambda: None, processes=[])

    def __init__(self, calls):
        self._llm, self._is_open, self.name = Llm(calls), False, "Tiny"

    def media(self):
        return None


class Written(SharedUpdate):
    """An update of nothing."""

    def __init__(self, version):
        Update.__init__(self, version, {})

    def check(self):
        pass

    def close(self):
        pass


@pytest.fixture
def make(monkeypatch):
    """An engine that is started, and what vLLM and its weights were told since, in order."""
    started = []

    def begin(options=None, **changes):
        calls = []

        def check(*_args, when="", **_options):
            calls.append(f"compare {when}".strip())

        weights = SimpleNamespace(
            load_first=lambda published: calls.append("first weights"),
            update=Written,
            load=lambda update: calls.append(f"load {update.version}"),
            digest=lambda: calls.append("digest") or "digest",
        )
        monkeypatch.setattr(module, "PreTrainedModel", nn.Module)
        monkeypatch.setattr(module, "canonical_tensors", lambda _: {})
        monkeypatch.setattr(module, "Backend", lambda *_, **__: Served(calls))
        monkeypatch.setattr(module, "Weights", lambda *_, **__: weights)
        monkeypatch.setattr(module, "check", check)
        model = SimpleNamespace(build=lambda **_: Tiny(), facts=lambda: SimpleNamespace(matrices={}))
        context = EngineContext(
            model=model, dtype=torch.float32, device=torch.device("cpu"), max_in_flight=1, context_length=8, seed=0,
            **changes,
        )  # fmt: skip
        made = VllmEngine(options or VllmOptions(), context)
        started.append(made)
        made.start()
        return made, calls

    yield begin
    for made in started:
        made.shutdown()


def test_vllm_sleeps_wakes_and_is_given_weights_before_it_generates(make):
    engine, calls = make(sleeps=True)
    # What is neither a parameter nor a buffer is in no digest: log-probs tell whether it survives.
    start = ["first weights", "compare", "sleep 2 keep", "wake", "first weights", "compare after it has slept,"]
    assert calls == start
    engine.pause("keep")
    engine.sleep()
    engine.sleep()
    engine.wake()
    engine.wake()
    with pytest.raises(EngineError, match="no weights are loaded since the engine slept"):
        engine.resume()
    engine.begin_update(7)
    assert engine.commit_update("keep") == "digest"
    engine.resume()
    assert calls[len(start) :] == ["sleep 2 keep", "wake", "load 7", "forget what was seen", "digest"]


def test_what_does_not_sleep_or_is_trusted_is_not_tried(make):
    assert make()[1] == ["first weights", "compare"]
    assert make(VllmOptions(verify=False), sleeps=True)[1] == ["first weights", "compare"]
