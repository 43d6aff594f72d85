from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import attrs
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from cosmos_core.models.facts import matrices_of
from cosmos_core.protocols import EngineContext, ModelFacts, Request, Sampling
from cosmos_core.rollout.embedded.engine import EmbeddedEngine
from cosmos_core.rollout.embedded.options import EmbeddedOptions
from cosmos_core.types import Array, Payload
from cosmos_core.weights.quantization import dequantise, quantise
from cosmos_core.weights.shards import canonical_tensors

torch.set_num_threads(1)

VOCABULARY = 97
STOP = 3
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": STOP,
    "pad_token_id": 0,
}


class FakeModel:
    """A model plugin without a tokenizer: builds a Hugging Face module from a config."""

    def __init__(self, config=None, stop_ids=frozenset({STOP})):
        self.config = config or Qwen3Config(**SHAPE, tie_word_embeddings=True)
        self.stop_ids = stop_ids

    def facts(self):
        return ModelFacts(
            architecture=type(self.config).__name__,
            num_parameters=0,
            num_layers=self.config.num_hidden_layers,
            hidden_size=self.config.hidden_size,
            vocab_size=self.config.vocab_size,
            tokenizer_size=self.config.vocab_size,
            context_length=self.config.max_position_embeddings,
            stop_ids=self.stop_ids,
            pad_id=0,
        )

    def build(self, *, seed, dtype, device, layout=None):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(self.config, dtype=dtype).to(device).eval()


def payload(ids) -> Payload:
    ids = np.asarray(ids, np.int32)
    return Payload(kind="tokens", arrays={"prompt": Array(dtype="int32", shape=ids.shape, data=ids.tobytes())})


def payload_of(prompt, completion) -> Payload:
    arrays = dict(payload(prompt).arrays)
    arrays["completion"] = payload(completion).arrays["prompt"]
    return Payload(kind="tokens", arrays=arrays)


def ragged(count: int, *, low: int = 2, high: int = 30, seed: int = 0) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(4, VOCABULARY, draw.integers(low, high)).tolist() for _ in range(count)]


def request(name, prompt, *, seed=0, priority=0, **sampling) -> Request:
    sampling.setdefault("max_units", 8)
    return Request(
        request_id=str(name), prompt=payload(prompt), sampling=Sampling(**sampling), seed=seed, priority=priority
    )


def completion(generated) -> list[int]:
    return np.frombuffer(generated.payload.arrays["completion"].data, np.int32).tolist()


def logprobs(generated) -> np.ndarray:
    return np.frombuffer(generated.payload.arrays["logprobs"].data, np.float32)


def versions(generated) -> list[int]:
    return np.frombuffer(generated.payload.arrays["versions"].data, np.int32).tolist()


def make_engine(
    model=None, *, max_in_flight=8, context_length=128, dtype=torch.float32, dialogues=False, **options
) -> EmbeddedEngine:
    context = EngineContext(
        model=model or FakeModel(),
        dtype=dtype,
        device=torch.device("cpu"),
        max_in_flight=max_in_flight,
        context_length=context_length,
        seed=1,
        dialogues=dialogues,
    )
    return EmbeddedEngine(EmbeddedOptions(**options), context)


def quantising_engine(trained, quantization) -> EmbeddedEngine:
    """A started engine that holds the matrices of a model in a format."""
    model = FakeModel()
    facts = attrs.evolve(model.facts(), matrices=matrices_of(trained))
    model.facts = lambda: facts
    context = EngineContext(
        model=model,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_in_flight=4,
        context_length=64,
        seed=1,
        quantization=quantization,
    )
    engine = EmbeddedEngine(EmbeddedOptions(verify=False), context)
    engine.start()
    return engine


def round_trip(trained, form) -> None:
    """Give a model's matrices the values that an engine holds of them in a format."""
    for name in matrices_of(trained) if form is not None else ():
        weights = trained.get_parameter(name).detach()
        weights.copy_(dequantise(form, name, quantise(form, name, weights), weights.shape[-1]))


def reference(model=None, *, seed=1):
    return (model or FakeModel()).build(seed=seed, dtype=torch.float32, device=torch.device("cpu"))


def load(engine, module, *, version, cache="keep"):
    """Load a module's weights."""
    tensors = canonical_tensors(module)
    engine.begin_update(version)
    for chunk, _ in engine.layout()[0]:
        engine.write(0, chunk, tensors[chunk.name])
    engine.commit_update(cache)


@torch.no_grad()
def plain_logprobs(module, prompt, answer, *, temperature=1.0) -> np.ndarray:
    """Log-probs of an answer by one unbatched forward of transformers itself."""
    logits = module(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    chosen = torch.log_softmax(logits.float() / temperature, -1).gather(1, torch.tensor(answer)[:, None])
    return chosen[:, 0].numpy()


def pause_when(monkeypatch, condition: Callable[[EmbeddedEngine], bool]) -> threading.Event:
    """Engines pause themselves after the step that makes something so; the event is set then.

    However long the test is held up meanwhile, they are no further.
    """
    step, paused = EmbeddedEngine._step, threading.Event()

    def stepped(engine: EmbeddedEngine) -> None:
        step(engine)
        if not paused.is_set() and condition(engine):
            engine._pause("keep", Future())
            paused.set()

    monkeypatch.setattr(EmbeddedEngine, "_step", stepped)
    return paused


@pytest.fixture
def engine(make) -> EmbeddedEngine:
    return make()


@pytest.fixture(scope="session")
def kit():
    """What this file defines, for tests: it is not importable by name."""
    return sys.modules[__name__]


@pytest.fixture
def make() -> Iterator[Callable[..., EmbeddedEngine]]:
    """Started engines that are shut down after the test."""
    engines = []

    def start(*args, **kwargs) -> EmbeddedEngine:
        engine = make_engine(*args, **kwargs)
        engine.start()
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.shutdown()
    assert not any(thread.name == "engine" and thread.is_alive() for thread in threading.enumerate())
