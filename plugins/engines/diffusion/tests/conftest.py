"""An engine with the kit's tiny world model, and how its samples are read."""

import threading
from concurrent.futures import Future

import attrs
import numpy as np
import pytest
import torch

from cosmos_core.protocols import EngineContext, Request, Sampling
from cosmos_core.testing.conformance.engine.latents import TinyDenoiser
from cosmos_core.types import Prompt
from cosmos_engine_diffusion.engine import DiffusionEngine
from cosmos_engine_diffusion.options import DiffusionOptions


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@attrs.define
class Denoised:
    """A started engine and its model."""

    engine: DiffusionEngine
    model: TinyDenoiser

    def prompt(self, text="hello", *, num_given_frames=0):
        return self.model.encode(Prompt(text=text, metadata={"num_given_frames": num_given_frames}))

    def request(self, name, prompt=None, *, seed=0, max_units=8, **sampling):
        return Request(
            request_id=str(name),
            prompt=prompt or self.prompt(),
            sampling=Sampling(max_units=max_units, **sampling),
            seed=seed,
        )

    def generate(self, *requests):
        return [handle.result(30) for handle in self.engine.submit(requests)]

    @staticmethod
    def array(generated, name):
        held = generated.payload.arrays[name]
        return np.frombuffer(held.data, np.dtype(held.dtype)).reshape(held.shape)


@pytest.fixture
def pause_when(monkeypatch):
    """Engines pause themselves after the step that makes something so; the event is set then."""
    step, paused = DiffusionEngine._step, threading.Event()

    def begin(condition):
        def stepped(engine):
            step(engine)
            if not paused.is_set() and condition(engine):
                engine._pause("keep", Future())
                paused.set()

        monkeypatch.setattr(DiffusionEngine, "_step", stepped)
        return paused

    return begin


@pytest.fixture
def started():
    engines = []

    def start(*, max_in_flight=16, model=None, **options):
        model = model or TinyDenoiser()
        context = EngineContext(
            model=model,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_in_flight=max_in_flight,
            context_length=1000,
            seed=1,
        )
        engine = DiffusionEngine(DiffusionOptions(**options), context)
        engine.start()
        engines.append(engine)
        return Denoised(engine, model)

    yield start
    for engine in engines:
        engine.shutdown()
