"""One bit of one tensor goes wrong, somewhere between a publisher and the products: nothing is generated with it."""

from __future__ import annotations

import pytest
import torch

from cosmos_core.rollout import weights_sync
from cosmos_core.rollout.serving.updates import LoadedWeights, Update
from cosmos_core.transport.reports import WeightsLoaded, WeightsRejected
from cosmos_core.weights.snapshot import Snapshot, view
from tests.updates import Pair

NAME = "model.layers.1.mlp.down_proj.weight"


def flip(tensor):
    """Flip the lowest bit of the first element."""
    tensor.detach().view(torch.uint8).flatten()[:1].bitwise_xor_(1)


class Run(Pair):
    def wait(self, number):
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.reports) >= number, 10), self.reports
        return self.reports[number - 1]


@pytest.fixture
def begin(kit, monkeypatch):
    monkeypatch.setattr(weights_sync, "_RETRY_S", (0.02,))
    runs = []

    def made(quantization, transport):
        runs.append(Run(kit, quantization, transport))
        return runs[-1]

    yield made
    for run in runs:
        run.close()


def in_the_file(run, patch):
    def sealed(snapshot, **keywords):
        published = seal(snapshot, **keywords)
        entry = next(entry for entry in snapshot.entries if entry.name == NAME)
        flip(view(snapshot.file.buffer, entry))
        run.repair = lambda: flip(view(snapshot.file.buffer, entry))
        return published

    seal = run.publisher.seal
    patch.setattr(run.publisher, "seal", sealed)


def on_the_wire(run, patch):
    def read(self, piece):
        data = whole(self, piece)
        if piece.name != NAME:
            return data
        data = bytearray(data)
        data[0] ^= 1
        return memoryview(data)

    whole = Snapshot.read
    patch.setattr(Snapshot, "read", read)
    run.repair = lambda: patch.setattr(Snapshot, "read", whole)


def in_what_is_loaded(run, patch):
    def applied(self):
        apply(self)
        flip(run.engine._loaded.tensors[NAME])

    apply = Update.apply
    patch.setattr(Update, "apply", applied)
    run.repair = lambda: patch.setattr(Update, "apply", apply)


def in_what_is_computed_with(run, patch):
    def settled(self):
        settle(self)
        flip(run.engine._loaded._parameters[NAME])

    settle = LoadedWeights.dequantise
    patch.setattr(LoadedWeights, "dequantise", settled)
    run.repair = lambda: patch.setattr(LoadedWeights, "dequantise", settle)


ARRIVED_WRONG = f"{NAME}: what arrived is not what was published"
WENT_WRONG = "all that arrived was right, so that it went wrong in the engine"
CASES = [
    *((form, "auto", in_the_file, ARRIVED_WRONG) for form in ("none", "fp8", "nvfp4")),
    *((form, "zmq", on_the_wire, ARRIVED_WRONG) for form in ("none", "fp8", "nvfp4")),
    *((form, "auto", in_what_is_loaded, WENT_WRONG) for form in ("none", "mxfp8", "mxfp4")),
    ("fp8", "auto", in_what_is_computed_with, f"{NAME}: the parameter that products are computed with is not what"),
]


@pytest.mark.parametrize("case", CASES, ids=[f"{case[0]}-{case[2].__name__}" for case in CASES])
def test_a_corrupted_slice_is_caught_named_and_never_generated_with(begin, monkeypatch, case):
    quantization, transport, corrupt, reason = case
    run = begin(quantization, transport)
    corrupt(run, monkeypatch)
    run.sync.aim(run.publish(3))
    first, second = run.wait(1), run.wait(2)
    assert isinstance(first, WeightsRejected)
    assert isinstance(second, WeightsRejected)
    assert first.version == second.version == 3
    assert reason in second.reason
    assert run.version_lock.loaded == -1
    assert not run.version_lock.enter(3)
    (held,) = run.engine.submit([run.kit.request("held", [4, 5], max_units=3)])
    with pytest.raises(TimeoutError):
        held.result(0.1)
    run.repair()
    with run.arrived:
        assert run.arrived.wait_for(lambda: isinstance(run.reports[-1], WeightsLoaded), 10)
    (generated,) = held.result(10)
    assert set(run.kit.versions(generated)) == {3}
    torch.testing.assert_close(
        torch.tensor(run.kit.logprobs(generated)), torch.tensor(run.expected_logprobs(generated)), atol=1e-5, rtol=0
    )
