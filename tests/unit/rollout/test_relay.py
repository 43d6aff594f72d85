from __future__ import annotations

import os

import pytest
import torch

from cosmos_core.errors import WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.rollout import relay as module
from cosmos_core.rollout.relay import Relay
from cosmos_core.transport.directives import WeightTarget
from cosmos_core.weights.digest import combine, tensor_digests
from cosmos_core.weights.receiver import WeightReceiver
from cosmos_core.weights.shards import dtype_name
from cosmos_core.weights.shared_memory import directories_for_files

torch.set_num_threads(1)

TENSORS = {
    "w": torch.arange(48.0).view(8, 6),
    "b": torch.arange(5.0),
    "scale": torch.tensor(3.5),
    "codes": torch.arange(24, dtype=torch.uint8).view(4, 6),
    "eighths": torch.linspace(-2, 2, 12).view(3, 4).to(torch.float8_e4m3fn),
}


def piece(name, start, shape):
    return TensorSlice(name=name, start=start, shape=shape)


def held(name, *, start=None, shape=None):
    whole = tuple(TENSORS[name].shape)
    return piece(name, start or (0,) * len(whole), whole if shape is None else shape), dtype_name(TENSORS[name].dtype)


# Two ranks that both hold all of `b`, `scale` and `codes`, and rows 3 and 4 of `w`.
BOTH = [held("b"), held("scale"), held("codes")]
LAYOUT = {
    0: [held("w", shape=(5, 6)), held("eighths", shape=(3, 1)), *BOTH],
    1: [held("w", start=(3, 0), shape=(5, 6)), held("eighths", start=(0, 1), shape=(3, 3)), *BOTH],
}


def content(each):
    return TENSORS[each.name][tuple(slice(s, s + n) for s, n in zip(each.start, each.shape, strict=True))]


def passed_on(relay, version, *, keep=True):
    with relay.copying(version, LAYOUT, keep=keep) as copy:
        for pieces in LAYOUT.values():
            for each, _ in pieces:
                copy.write(each, content(each))
        return copy.serve(tensor_digests(TENSORS))


def target(version, endpoint):
    digest = combine(tensor_digests(TENSORS))
    return WeightTarget(version=version, digest=digest, sources=(endpoint,), hosts=("here",))


def files():
    return {path for folder in directories_for_files() for path in folder.glob(f"cosmos-weights-{os.getpid()}-*")}


@pytest.mark.parametrize("transport", ["shared-memory", "zmq"])
def test_what_was_loaded_is_read_by_others(transport):
    before = files()
    with Relay("run") as relay, WeightReceiver(transport, run_id="run", host="here") as receiver:
        endpoint = passed_on(relay, 3)
        with receiver.fetch(target(3, endpoint), {0: [held(name) for name in TENSORS]}, 5.0) as pieces:
            found = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
            for _, each, data in pieces:
                found[each.name][tuple(slice(s, s + n) for s, n in zip(each.start, each.shape, strict=True))] = data
        assert tensor_digests(found) == tensor_digests(TENSORS)
        assert len(files() - before) == 1
    assert files() <= before


def test_copies_are_dropped_when_nobody_needs_them():
    before = files()
    with Relay("run") as relay, WeightReceiver("zmq", run_id="run", host="here") as receiver:
        first, second = passed_on(relay, 3), passed_on(relay, 4)
        assert first == second
        relay.retain(4, keep=True)
        with (
            pytest.raises(WeightSyncError, match=r"version 3 is gone: .* it holds only the versions 4"),
            receiver.fetch(target(3, first), LAYOUT, 5.0),
        ):
            pass
        # Nobody reads from here any more: what is left is what may still be needed, then nothing at all.
        relay.retain(4, keep=False)
        assert len(files() - before) >= 1
        relay.retain(5, keep=False)
        assert files() <= before
        assert passed_on(relay, 5) != second


def test_copies_of_steps_that_were_undone_are_dropped():
    before = files()
    with Relay("run") as relay, WeightReceiver("zmq", run_id="run", host="here") as receiver:
        relay.drop_after(3)
        passed_on(relay, 3)
        endpoint = passed_on(relay, 4)
        relay.drop_after(3)
        assert relay._publisher.held == (3,)
        assert len(files() - before) == 1
        with (
            pytest.raises(WeightSyncError, match="holds only the versions 3"),
            receiver.fetch(target(4, endpoint), LAYOUT, 5.0),
        ):
            pass
    assert files() <= before


def test_a_replica_that_nobody_reads_from_keeps_nothing():
    before = files()
    with Relay("run") as relay:
        assert passed_on(relay, 3, keep=False) == ""
        assert relay._publisher is None
    assert files() <= before


def test_what_is_not_attested_is_not_served():
    before = files()
    with Relay("run") as relay:
        with pytest.raises(KeyError), relay.copying(3, LAYOUT, keep=True):
            raise KeyError("the digest is wrong")
        assert relay._publisher.held == ()
        assert files() <= before


def test_a_copy_that_cannot_be_made_is_no_reason_not_to_load(monkeypatch, caplog):
    def full(*_):
        raise WeightSyncError("no room for the snapshot")

    with Relay("run") as relay:
        monkeypatch.setattr(module.WeightPublisher, "reserve", full)
        assert passed_on(relay, 3) == ""
    assert "weights version 3 are not passed on to other replicas" in caplog.text
    assert "no room for the snapshot" in caplog.text
