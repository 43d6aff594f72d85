"""A replica that keeps what it has loaded gets only what changed, and all of it whenever anything is in doubt."""

from __future__ import annotations

import threading

import pytest
import torch

from cosmos_core.models.facts import matrices_of
from cosmos_core.policy.publication import Publications
from cosmos_core.protocols.quantization import FORMATS
from cosmos_core.rollout import weights_sync
from cosmos_core.rollout.relay import Relay
from cosmos_core.rollout.version_lock import VersionLock
from cosmos_core.rollout.weights_sync import WeightSync
from cosmos_core.transport.directives import Relaying, WeightTarget
from cosmos_core.transport.reports import WeightsLoaded, WeightsPublished, WeightsRejected
from cosmos_core.weights import server
from cosmos_core.weights.publisher import WeightPublisher
from cosmos_core.weights.receiver import WeightReceiver
from cosmos_core.weights.shards import canonical_tensors
from cosmos_core.weights.snapshot import Base, view

NAME = "model.layers.1.mlp.down_proj.weight"


class Pair:
    """A policy that publishes, and a replica that loads what changed."""

    def __init__(self, kit, quantization="none", transport="zmq"):
        self.kit, self.form, self.trained = kit, FORMATS.get(quantization), kit.reference(seed=7)
        matrices = matrices_of(self.trained)
        self.engine = kit.quantising_engine(self.trained, quantization)
        self.reports, self.arrived, self.published = [], threading.Condition(), []
        self.publisher, self.relay, self.base = WeightPublisher("run"), Relay("run"), Base()
        self.publications = Publications(self.publisher, torch.float32, self.report, form=self.form, matrices=matrices)
        self.receiver, self.version_lock = WeightReceiver(transport, run_id="run", host="here"), VersionLock()
        self.sync = WeightSync(
            self.engine,
            self.receiver,
            self.version_lock,
            cache="keep",
            in_flight_update=True,
            report=self.report,
            relay=self.relay,
            relay_timeout_s=0.2,
            base=self.base,
        )
        self.sync.start()

    def report(self, report):
        with self.arrived:
            (self.published if isinstance(report, WeightsPublished) else self.reports).append(report)
            self.arrived.notify_all()

    def train(self, share=0.02):
        """Change a share of the weights."""
        draw = torch.Generator().manual_seed(len(self.published))
        with torch.no_grad():
            for tensor in self.trained.parameters():
                tensor.mul_(torch.where(torch.rand(tensor.shape, generator=draw) < share, 0.5, 1.0))

    def publish(self, version):
        """Where the weights can be read."""
        self.publications.publish(version, canonical_tensors(self.trained))
        with self.arrived:
            assert self.arrived.wait_for(lambda: self.published and self.published[-1].version == version, 10)
        return self.target(self.publisher.endpoint)

    def target(self, endpoint):
        """The newest version, at an endpoint."""
        newest = self.published[-1]
        return WeightTarget(version=newest.version, digest=newest.digest, sources=(endpoint,), hosts=("here",))

    def load(self, target, relaying=None, num_reports=1):
        """Load a version; the last of so many reports of it."""
        self.sync.aim(target, relaying or Relaying())
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.of(target.version)) >= num_reports, 10), self.reports
            return self.of(target.version)[-1]

    def of(self, version):
        return [report for report in self.reports if report.version == version]

    def generates_as_trained(self):
        generated = self.engine.submit([self.kit.request("probe", [4, 5], max_units=3)])[0].result(5)[0]
        self.kit.round_trip(self.trained, self.form)
        expected = self.kit.plain_logprobs(self.trained, [4, 5], self.kit.completion(generated))
        found = torch.tensor(self.kit.logprobs(generated))
        return torch.allclose(found, torch.tensor(expected), atol=1e-4, rtol=0)

    def close(self):
        self.sync.close()
        self.publications.close()
        for part in (self.relay, self.base, self.receiver, self.publisher):
            part.close()
        self.engine.shutdown()


@pytest.fixture
def begin(kit, monkeypatch):
    monkeypatch.setattr(weights_sync, "_RETRY_S", (0.02,))
    pairs = []

    def made(*options):
        pairs.append(Pair(kit, *options))
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
