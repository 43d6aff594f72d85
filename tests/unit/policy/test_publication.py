import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cosmos_core.errors import WeightSyncError
from cosmos_core.models.parallel.channel import all_gathered, gathered, open_channel
from cosmos_core.policy.publication import Publications
from cosmos_core.protocols.quantization import FORMATS
from cosmos_core.testing.worlds import run_world
from cosmos_core.transport.directives import WeightTarget
from cosmos_core.transport.reports import WeightsPublished
from cosmos_core.weights import slices
from cosmos_core.weights.digest import combine, digest_of, tensor_digests
from cosmos_core.weights.publisher import WeightPublisher
from cosmos_core.weights.quantization import quantise_tensors
from cosmos_core.weights.receiver import WeightReceiver
from cosmos_core.weights.shards import canonical_tensors, dtype_name
from cosmos_core.weights.snapshot import take_snapshot, view


class Publisher:
    def __init__(self):
        self.go = threading.Event()
        self.staged = []
        self.error = None

    def stage(self, version, tensors, dtype, *, quantised):
        snapshot = take_snapshot(version, tensors, dtype, quantised=quantised)
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


def matrices():
    return {name: tuple(tensor.shape) for name, tensor in weights().named_parameters() if tensor.ndim == 2}


def sent_of(tensors, quantization):
    """What is published of whole tensors."""
    if quantization == "none":
        return {name: tensor.bfloat16() for name, tensor in tensors.items()}
    made = quantise_tensors(FORMATS[quantization], tensors, matrices())
    return {name: tensor.bfloat16() if name.endswith("bias") else tensor for name, tensor in made.items()}


def publish_spread(size, steps, quantization):
    """Publish from every process, and fetch on the first what all of them hold."""
    module = weights()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "fsdp"))
    fully_shard(module, mesh=mesh if size > 2 else mesh["fsdp"])
    reports = []
    with WeightPublisher("run") as publisher:
        publications = Publications(
            publisher,
            torch.bfloat16,
            reports.append,
            open_channel(),
            form=FORMATS.get(quantization),
            matrices=matrices(),
        )
        for step in range(steps):
            tensors = canonical_tensors(module)
            publications.publish(step, tensors)
            with torch.no_grad():
                for tensor in tensors.values():
                    tensor.add_(1.0)
        publications.close()
        sources = [None] * size
        dist.all_gather_object(sources, publisher.endpoint)
        found = [fetched(report, sources, kind, quantization) for report in reports for kind in ("auto", "zmq")]
        dist.barrier()
    return reports, found


def fetched(report, sources, kind, quantization):
    target = WeightTarget(
        version=report.version, digest=report.digest, sources=tuple(sources), hosts=("h",) * len(sources)
    )
    expected = sent_of(canonical_tensors(weights()), quantization)
    layout = {
        0: [(slices.whole(name, tuple(tensor.shape)), dtype_name(tensor.dtype)) for name, tensor in expected.items()]
    }
    loaded = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    with WeightReceiver(kind, run_id="run", host="h") as receiver, receiver.fetch(target, layout, 20.0) as pieces:
        for _, piece, data in pieces:
            place = tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))
            loaded[piece.name][place] = data
        assert tensor_digests(loaded) == pieces.digests
    return loaded


def test_processes_publish_what_each_holds_under_the_digest_of_the_whole():
    for size, quantization in [(2, "none"), (4, "none"), (4, "fp8"), (2, "nvfp4")]:
        (reports, found), *others = run_world(size, publish_spread, size, 2, quantization)
        assert others == [([], [])] * (size - 1)
        with torch.no_grad():
            module = weights()
            for version, report in enumerate(reports):
                sent = sent_of(canonical_tensors(module), quantization)
                nbytes = sum(tensor.nbytes for tensor in sent.values())
                assert report == WeightsPublished(version=version, digest=digest_of(sent), nbytes=nbytes)
                for loaded in found[2 * version : 2 * version + 2]:
                    for name, tensor in sent.items():
                        assert torch.equal(loaded[name].view(torch.uint8), tensor.contiguous().view(torch.uint8))
                for tensor in canonical_tensors(module).values():
                    tensor.add_(1.0)


def test_what_cannot_be_quantised_is_refused_and_leaves_no_file(tmp_path):
    with WeightPublisher("run", directory=tmp_path) as publisher:
        publications = Publications(publisher, torch.bfloat16, print, form=FORMATS["fp8"], matrices={"w": (2, 3)})
        with pytest.raises(WeightSyncError, match="w: it has elements that are not finite, which no codes can hold"):
            publications.publish(1, {"w": torch.full((2, 3), torch.inf)})
        assert list(tmp_path.iterdir()) == []
        publications.close()


def publish_spoilt(size, spoilt):
    """Publish weights of which one process has what no format holds; what each process says of it."""
    module = weights()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("fsdp",))
    fully_shard(module, mesh=mesh)
    tensors = canonical_tensors(module)
    if dist.get_rank() == spoilt:
        with torch.no_grad():
            tensors["0.weight"].to_local()[-1, -1] = torch.nan
    with WeightPublisher("run") as publisher:
        publications = Publications(
            publisher,
            torch.bfloat16,
            print,
            open_channel(),
            form=FORMATS["fp8"],
            matrices=matrices(),
            exchange=lambda said: all_gathered(said, lambda buffer: gathered(buffer, size)),
        )
        with pytest.raises(WeightSyncError) as error:
            publications.publish(0, tensors)
        publications.close()
    return str(error.value)


def test_what_one_process_cannot_quantise_ends_all_of_them_with_one_message():
    said = run_world(2, publish_spoilt, 2, 1)
    assert said[0] == said[1]
    assert said[0].startswith("process 1: 0.weight: it has elements that are not finite, which no codes can hold")
