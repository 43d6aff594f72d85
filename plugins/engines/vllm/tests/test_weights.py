"""An update that fails on one of two ranks: what was loaded before stays whole, or nothing is served. Needs no vLLM."""

import contextlib
import threading
from types import SimpleNamespace

import attrs
import pytest
import torch
from torch import nn

from cosmos_core.errors import AttestationError, EngineLostError, WeightSyncError
from cosmos_core.protocols import EngineContext
from cosmos_core.rollout import weights_sync
from cosmos_core.rollout.relay import Relay
from cosmos_core.rollout.version_lock import VersionLock
from cosmos_core.rollout.weights_sync import WeightSync
from cosmos_core.transport.directives import WeightTarget
from cosmos_core.transport.reports import WeightsLoaded, WeightsRejected
from cosmos_core.weights import slices
from cosmos_core.weights.digest import digest_of, tensor_digests
from cosmos_engine_vllm import shares
from cosmos_engine_vllm.admission import Admission
from cosmos_engine_vllm.engine import VllmEngine
from cosmos_engine_vllm.extension import WorkerExtension
from cosmos_engine_vllm.options import VllmOptions
from cosmos_engine_vllm.staging import Reading, Staging
from cosmos_engine_vllm.weights import Weights
from cosmos_engine_vllm.workers import Workers

ROWS = {0: (0, 2), 1: (2, 4)}


def tensors(version):
    return {"w": torch.full((4, 3), float(version)), "norm": torch.full((3,), float(version))}


class Half(nn.Module):
    """A rank's half of the rows of `w`, and all of `norm`."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.w = nn.Parameter(torch.zeros(2, 3), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.made_by_vllm = ()

    def load_weights(self, weights):
        for name, tensor in weights:
            first, last = ROWS[self.rank]
            self.get_parameter(name).data.copy_(tensor[first:last] if name == "w" else tensor)


class Worker(WorkerExtension):
    """A worker as vLLM makes one, of the extension and a class of its own."""

    def __init__(self, rank):
        self.rank, self.model = rank, Half(rank)

    def get_model(self):
        return self.model

    def version(self):
        """Of all that it holds; None if it holds several."""
        (*found,) = {value for each in self.model.parameters() for value in each.flatten().tolist()}
        return found[0] if len(found) == 1 else None


class Ranks:
    """Calls every worker, whatever the others answer, as vLLM does."""

    def __init__(self):
        self.model_executor = None
        self.workers = [Worker(rank) for rank in (0, 1)]

    def collective_rpc(self, method, timeout, args=()):
        return [getattr(worker, method)(*args) for worker in self.workers]

    def versions(self):
        return [worker.version() for worker in self.workers]


MODEL = SimpleNamespace(facts=lambda: SimpleNamespace(matrices={}))
CONTEXT = EngineContext(
    model=MODEL,
    dtype=torch.float32,
    device=torch.device("cpu"),
    max_in_flight=1,
    context_length=8,
    seed=0,
    tensor_parallel=2,
)


def make_weights(ranks):
    meta = {name: tensor.to("meta") for name, tensor in tensors(0).items()}
    workers = Workers(ranks, lost=lambda failure: None)
    made = Weights(workers, "Half", CONTEXT, tensors=meta, published=meta)
    made.load_first(tensors(0))
    return made


def write(update, layout, version):
    for rank, held in layout.items():
        for piece, _ in held:
            update.write_to(rank, piece, slice_of(tensors(version), piece))


def slice_of(whole, piece):
    return whole[piece.name][slices.within(piece, slices.whole(piece.name, tuple(whole[piece.name].shape)))]


@pytest.fixture
def ranks():
    return Ranks()


@contextlib.contextmanager
def unreadable(_ranks):
    """The second rank cannot read its slices."""
    get, seen = Reading.get, []

    def fail(self, place):
        if self not in seen:
            seen.append(self)
        if len(seen) > 1:
            raise WeightSyncError(f"the weights that were put at {place.path} cannot be read")
        return get(self, place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reading, "get", fail)
        yield


@contextlib.contextmanager
def uncopied(ranks):
    """The second rank fails to copy its slices."""

    def fail(pieces):
        raise WeightSyncError("no memory to copy them")

    held = ranks.workers[1]._cosmos_held
    held.copy = fail
    try:
        yield
    finally:
        del held.copy


def test_first_weights_are_staged_in_parts(ranks, monkeypatch):
    # 72 bytes: half of `w` and all of `norm` for each of two ranks.
    monkeypatch.setattr("cosmos_engine_vllm.weights._PART_BYTES", 40)
    staged = []
    monkeypatch.setattr(shares, "Staging", lambda size: staged.append(size) or Staging(size))
    weights = make_weights(ranks)
    weights.load_first(tensors(3))
    assert staged == [36, 36] * 2
    assert ranks.versions() == [3.0, 3.0]
    # The first part is compared, too, though another is loaded after it.
    held = ranks.workers[0]._cosmos_held
    monkeypatch.setattr(held, "copy", lambda pieces: None)
    with pytest.raises(AttestationError, match="w: vLLM's rank 0 does not hold"):
        weights.load_first(tensors(4))
    assert ranks.versions() == [3.0, 3.0]


def test_what_a_rank_cannot_read_no_rank_copies(ranks):
    weights = make_weights(ranks)
    update = weights.update(1)
    write(update, weights.layout(), 1)
    with unreadable(ranks), pytest.raises(WeightSyncError, match="cannot be read") as raised:
        weights.load(update)
    assert not isinstance(raised.value, AttestationError)
    assert ranks.versions() == [0.0, 0.0]
    # What the first rank found is not kept until the next update.
    assert [worker._cosmos_written for worker in ranks.workers] == [(), ()]
    weights.load(update)
    assert weights.digest() == digest_of(tensors(1))
    update.close()


def test_what_a_rank_did_not_copy_is_no_version(ranks):
    weights = make_weights(ranks)
    update = weights.update(1)
    write(update, weights.layout(), 1)
    with uncopied(ranks), pytest.raises(AttestationError, match=r"parts of version 1 .*: no memory to copy them"):
        weights.load(update)
    assert ranks.versions() == [1.0, 0.0]
    weights.load(update)
    assert weights.digest() == digest_of(tensors(1))
    update.close()


class Engine(VllmEngine):
    """The vllm engine, on these ranks; it has nothing to generate."""

    def __init__(self, ranks):
        super().__init__(VllmOptions(), CONTEXT)
        self.ranks = ranks

    def _build(self):
        self._backend = SimpleNamespace(settle=lambda: None, drop=lambda names: None, close=lambda: None)
        self._weights = make_weights(self.ranks)
        self._admission = Admission(self._backend, num_slots=1)


@attrs.define
class Fetched:
    digests: dict
    pieces: list
    is_stored: bool = False
    spared: int = 0
    num_whole: int = 0

    def __iter__(self):
        return iter(self.pieces)


class Receiver:
    @contextlib.contextmanager
    def fetch(self, target, layout, timeout_s, **_options):
        whole = tensors(target.version)
        pieces = [(rank, piece, slice_of(whole, piece)) for rank, held in layout.items() for piece, _ in held]
        yield Fetched(tensor_digests(whole), pieces)


class Rig:
    """A replica's weights, and what every rank held whenever generation went on."""

    def __init__(self, ranks):
        self.ranks, self.engine, self.version_lock = ranks, Engine(ranks), VersionLock()
        self.reports, self.resumed, self.arrived = [], [], threading.Condition()
        self.relay = Relay("run")
        resume = self.engine.resume

        def watched():
            with self.arrived:
                self.resumed.append((self.version_lock.loaded, ranks.versions()))
                self.arrived.notify_all()
            resume()

        self.engine.resume = watched
        self.sync = WeightSync(
            self.engine,
            Receiver(),
            self.version_lock,
            cache="keep",
            in_flight_update=True,
            report=self.report,
            relay=self.relay,
            relay_timeout_s=1.0,
            patience_s=20.0,
        )
        self.engine.start()
        self.sync.start()

    def report(self, report):
        with self.arrived:
            self.reports.append(report)
            self.arrived.notify_all()

    def aim(self, version):
        self.sync.aim(WeightTarget(version=version, digest=digest_of(tensors(version)), sources=("x",), hosts=("x",)))

    def wait(self, condition):
        with self.arrived:
            assert self.arrived.wait_for(condition, 20), self.reports

    def load(self, version):
        self.aim(version)
        self.wait(lambda: any(isinstance(each, WeightsLoaded) and each.version == version for each in self.reports))

    def close(self):
        self.sync.close()
        self.engine.shutdown()
        self.relay.close()


@pytest.fixture
def rig(ranks, monkeypatch):
    monkeypatch.setattr(weights_sync, "_RETRY_S", (0.02,))
    made = Rig(ranks)
    yield made
    made.close()


def test_ranks_that_could_not_read_go_on_with_what_is_whole(rig, ranks):
    rig.load(1)
    with unreadable(ranks):
        rig.aim(2)
        rig.wait(lambda: len(rig.resumed) > 1)
    rig.load(2)
    assert rig.resumed[0][0] == rig.resumed[1][0] == 1
    assert all(versions == [float(loaded)] * 2 for loaded, versions in rig.resumed), rig.resumed


def test_ranks_that_hold_two_versions_never_generate(rig, ranks):
    rig.load(1)
    with uncopied(ranks):
        rig.aim(2)
        rig.wait(lambda: any(isinstance(each, WeightsRejected) for each in rig.reports))
        assert rig.version_lock.loaded == -1
    rig.load(2)
    assert all(versions == [float(loaded)] * 2 for loaded, versions in rig.resumed), rig.resumed
    assert [loaded for loaded, _ in rig.resumed] == [1, 2]


def test_a_worker_that_ended_before_commands_were_taken_refuses_the_start(ranks):
    engine = Engine(ranks)
    build = engine._build

    def lost():
        build()
        engine._lose(EngineLostError("vLLM's worker of rank 1 was ended by signal 9"))

    engine._build = lost
    with pytest.raises(EngineLostError, match="worker of rank 1 was ended by signal 9"):
        engine.start()
    with pytest.raises(EngineLostError, match="worker of rank 1"):
        engine.health()
    engine.shutdown()
