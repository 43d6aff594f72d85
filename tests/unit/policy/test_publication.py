import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cosmos_core.errors import WeightSyncError
from cosmos_core.policy.processes.channel import open_channel
from cosmos_core.policy.publication import Publications
from cosmos_core.testing.worlds import run_world
from cosmos_core.transport.messages import WeightsPublished, WeightTarget
from cosmos_core.weights import slices
from cosmos_core.weights.digest import combine, digest_of
from cosmos_core.weights.publisher import WeightPublisher
from cosmos_core.weights.receiver import WeightReceiver
from cosmos_core.weights.shards import canonical_tensors
from cosmos_core.weights.snapshot import take_snapshot, view


class Publisher:
    def __init__(self):
        self.go = threading.Event()
        self.staged = []
        self.error = None

    def stage(self, version, tensors, dtype, *, placements):
        snapshot = take_snapshot(version, tensors, dtype, placements=placements)
        self.staged.append(snapshot)
        return snapshot

    def seal(self, snapshot, *, digests):
        self.go.wait(10)
        if self.error:
            raise self.error
        return WeightsPublished(version=snapshot.version, digest=combine(digests), nbytes=snapshot.nbytes)


def test_training_goes_on_while_a_version_is_sealed():
    publisher, reports = Publisher(), []
    publications = Publications(publisher, torch.bfloat16, reports.append)
    assert publications.newest == -1
    weight = torch.ones(2)
    publications.publish(3, {"w": weight})
    weight.fill_(9.0)
    assert (publications.newest, reports) == (3, [])
    publisher.go.set()
    publications.close()
    sent = torch.ones(2, dtype=torch.bfloat16)
    assert reports == [WeightsPublished(version=3, digest=digest_of({"w": sent}), nbytes=4)]
    (snapshot,) = publisher.staged
    assert torch.equal(view(snapshot.file.buffer, snapshot.entries[0]), sent)


def test_a_failure_in_the_background_comes_up():
    publisher = Publisher()
    publisher.error = WeightSyncError("no room")
    publisher.go.set()
    publications = Publications(publisher, torch.float32, print)
    publications.publish(1, {})
    with pytest.raises(WeightSyncError, match="no room"):
        publications.close()


def weights():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Linear(7, 1))


def publish_spread(size, steps):
    """Publish from every process, and fetch on the first what all of them hold."""
    module = weights()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "fsdp"))
    fully_shard(module, mesh=mesh if size > 2 else mesh["fsdp"])
    reports = []
    with WeightPublisher("run") as publisher:
        publications = Publications(publisher, torch.bfloat16, reports.append, open_channel())
        for step in range(steps):
            tensors = canonical_tensors(module)
            publications.publish(step, tensors)
            with torch.no_grad():
                for tensor in tensors.values():
                    tensor.add_(1.0)
        publications.close()
        sources = [None] * size
        dist.all_gather_object(sources, publisher.endpoint)
        found = [fetched(report, sources, kind) for report in reports for kind in ("auto", "zmq")]
        dist.barrier()
    return reports, found


def fetched(report, sources, kind):
    target = WeightTarget(
        version=report.version, digest=report.digest, sources=tuple(sources), hosts=("h",) * len(sources)
    )
    expected = {name: tensor.bfloat16() for name, tensor in canonical_tensors(weights()).items()}
    layout = {0: [(slices.whole(name, tuple(tensor.shape)), "bfloat16") for name, tensor in expected.items()]}
    loaded = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
    with WeightReceiver(kind, run_id="run", host="h") as receiver, receiver.fetch(target, layout, 20.0) as pieces:
        for _, piece, data in pieces:
            place = tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))
            loaded[piece.name][place] = data
        assert pieces.first_difference(loaded) is None
    return loaded


@pytest.mark.parametrize("size", [2, 4])
def test_processes_publish_what_each_holds_under_the_digest_of_the_whole(size):
    (reports, found), *others = run_world(size, publish_spread, size, 2)
    assert others == [([], [])] * (size - 1)
    with torch.no_grad():
        module = weights()
        for version, report in enumerate(reports):
            sent = {name: tensor.bfloat16() for name, tensor in canonical_tensors(module).items()}
            nbytes = sum(tensor.nbytes for tensor in sent.values())
            assert report == WeightsPublished(version=version, digest=digest_of(sent), nbytes=nbytes)
            for loaded in found[2 * version : 2 * version + 2]:
                assert all(torch.equal(loaded[name], tensor) for name, tensor in sent.items())
            for tensor in canonical_tensors(module).values():
                tensor.add_(1.0)
