"""A replica that keeps what it has loaded gets only what changed, and all of it whenever anything is in doubt."""

from __future__ import annotations

import pytest
import torch

from cosmos_core.rollout import weights_sync
from cosmos_core.transport.directives import Relaying
from cosmos_core.transport.reports import WeightsLoaded, WeightsRejected
from cosmos_core.weights import server
from cosmos_core.weights.snapshot import Base, view
from tests.updates import Pair

NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def begin(kit, monkeypatch):
    monkeypatch.setattr(weights_sync, "_RETRY_S", (0.02,))
    pairs = []

    def made(*options):
        pairs.append(Pair(kit, *options, base=Base()))
        return pairs[-1]

    yield made
    for pair in pairs:
        pair.close()


@pytest.mark.parametrize("quantization", ["none", "fp8", "mxfp4"])
def test_from_the_second_version_on_only_what_changed_is_sent(begin, quantization):
    pair = begin(quantization)
    first = pair.load(pair.publish(1))
    assert (first.spared, first.nbytes > 0) == (0, True)
    for version in (2, 3):
        pair.train()
        loaded = pair.load(pair.publish(version))
        assert isinstance(loaded, WeightsLoaded)
        assert loaded.nbytes == first.nbytes
        assert 0.6 * loaded.nbytes < loaded.spared < loaded.nbytes
    assert pair.generates_as_trained()


def test_a_wrong_copy_is_caught_and_all_comes_next(begin):
    pair = begin()
    pair.load(pair.publish(1))
    entry = next(entry for entry in pair.base._snapshot.entries if entry.name == NAME)
    view(pair.base._snapshot.file.buffer, entry).view(torch.uint8)[0, 0] ^= 1
    pair.train(0.0)
    loaded = pair.load(pair.publish(2), num_reports=2)
    assert isinstance(pair.reports[-2], WeightsRejected)
    assert (isinstance(loaded, WeightsLoaded), loaded.spared) == (True, 0)
    assert pair.generates_as_trained()
    pair.train()
    assert pair.load(pair.publish(3)).spared > 0


def test_changes_that_do_not_fit_are_fetched_whole(begin, monkeypatch, caplog):
    pair = begin()
    pair.load(pair.publish(1))
    torn = "gaps-1", memoryview(bytes(3))
    monkeypatch.setattr(server, "encode", lambda *_: torn)
    pair.train()
    loaded = pair.load(pair.publish(2))
    assert (loaded.spared, pair.version_lock.loaded) == (0, 2)
    assert "3 bytes are no changes of" in caplog.text
    assert pair.generates_as_trained()


def test_a_policy_that_has_the_base_no_more_sends_all_and_the_log_says_so(begin, caplog):
    pair = begin()
    pair.load(pair.publish(1))
    pair.publisher.retain(2)
    pair.train()
    assert pair.load(pair.publish(2)).spared == 0
    assert "version 2: 1 answers came whole, as their sources have no more what was loaded before" in caplog.text
    pair.train()
    assert pair.load(pair.publish(3)).spared > 0


def test_a_replica_that_maps_what_is_published_keeps_nothing(begin):
    pair = begin("none", "auto")
    for version in (1, 2):
        assert pair.load(pair.publish(version)).spared == 0
        assert pair.base._snapshot is None


def test_replicas_pass_changes_on_and_whoever_joined_late_gets_all(begin):
    parent, child = begin(), begin()
    found = []
    for version in (1, 2, 3):
        passed = parent.load(parent.publish(version), Relaying(keep=True, retain=0)).endpoint
        if version > 1:
            found.append(child.load(parent.target(passed), Relaying(level=1)))
        parent.train()
    first, second = found
    assert (first.spared, first.relayed) == (0, first.nbytes)
    assert (second.spared > 0.6 * second.nbytes, second.relayed) == (True, second.nbytes)
