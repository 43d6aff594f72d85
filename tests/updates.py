"""A policy that publishes weights, and a replica that loads them."""

from __future__ import annotations

import threading

import torch

from cosmos_core.models.facts import matrices_of
from cosmos_core.policy.publication import Publications
from cosmos_core.protocols.quantization import FORMATS
from cosmos_core.rollout.relay import Relay
from cosmos_core.rollout.version_lock import VersionLock
from cosmos_core.rollout.weights_sync import WeightSync
from cosmos_core.transport.directives import Relaying, WeightTarget
from cosmos_core.transport.reports import WeightsPublished
from cosmos_core.weights.publisher import WeightPublisher
from cosmos_core.weights.receiver import WeightReceiver
from cosmos_core.weights.shards import canonical_tensors


class Pair:
    """A policy that publishes, and a replica that loads what changed."""

    def __init__(self, kit, quantization="none", transport="zmq", *, base=None):
        self.kit, self.form, self.trained = kit, FORMATS.get(quantization), kit.reference(seed=7)
        matrices = matrices_of(self.trained)
        self.engine = kit.quantising_engine(self.trained, quantization)
        self.reports, self.arrived, self.published = [], threading.Condition(), []
        self.publisher, self.relay, self.base = WeightPublisher("run"), Relay("run"), base
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
        found = torch.tensor(self.kit.logprobs(generated))
        return torch.allclose(found, torch.tensor(self.expected_logprobs(generated)), atol=1e-4, rtol=0)

    def expected_logprobs(self, generated):
        """Of the trainer's weights as the replica holds them."""
        self.kit.round_trip(self.trained, self.form)
        return self.kit.plain_logprobs(self.trained, [4, 5], self.kit.completion(generated))

    def close(self):
        self.sync.close()
        self.publications.close()
        for part in (self.relay, self.base, self.receiver, self.publisher):
            if part is not None:
                part.close()
        self.engine.shutdown()
