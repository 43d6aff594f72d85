"""Weights that rollout replicas pass on to one another: in a run, and among processes one of which is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cosmos_core.control.journal import entries
from cosmos_core.control.machine.events import Reported
from cosmos_core.transport.reports import REPORT, WeightsLoaded, WeightsRejected
from tests.commandline import CommandLine

SETTINGS = (
    "warmup.steps=2",
    "run.steps=3",
    "sync.mode=sync",
    "sync.transport=zmq",
    "rollout.replicas=4",
    "evaluation.interval=2",
)


PROCESS = """
import json, sys, time
from pathlib import Path
import attrs, torch
from cosmos_core.protocols import TensorSlice
from cosmos_core.rollout import weights_sync
from cosmos_core.rollout.version_lock import VersionLock
from cosmos_core.rollout.relay import Relay
from cosmos_core.rollout.weights_sync import WeightSync
from cosmos_core.transport.directives import Relaying, WeightTarget
from cosmos_core.transport.reports import WeightsLoaded
from cosmos_core.weights.digest import digest_of
from cosmos_core.weights.publisher import WeightPublisher
from cosmos_core.weights.receiver import WeightReceiver

torch.set_num_threads(1)
folder, role = Path(sys.argv[1]), sys.argv[2]
SHAPE = (8000, 4000)


def tell(**what):
    print(json.dumps(what), flush=True)


class Engine:
    # Holds one tensor; stops at the first slice that comes, if it shall, until it is told to go on.
    def __init__(self):
        self.tensor, self.stops = torch.zeros(SHAPE, dtype=torch.bfloat16), False

    def layout(self):
        return {0: [(TensorSlice(name="w", start=(0, 0), shape=SHAPE), "bfloat16")]}

    def write(self, rank, piece, data):
        if self.stops:
            self.stops = False
            tell(stopped=True)
            while not (folder / "go").exists():
                time.sleep(0.01)
        self.tensor[tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape))] = data

    def commit_update(self, cache):
        return digest_of({"w": self.tensor})

    def nothing(self, *_):
        pass

    begin_update = abort_update = pause = resume = nothing


def report(report):
    assert isinstance(report, WeightsLoaded), report
    tell(**attrs.asdict(report))


if role == "policy":
    publisher = WeightPublisher("run", directory=folder)
    tensors = {"w": torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).view(SHAPE)}
    for version in (1, 2):
        tell(endpoint=publisher.endpoint, digest=publisher.publish(version, tensors, torch.bfloat16).digest)
    sys.stdin.read()
else:
    engine, relay = Engine(), Relay("run", directory=folder)
    receiver = WeightReceiver("zmq", run_id="run", host="here", stall_s=5.0)
    sync = WeightSync(
        engine,
        receiver,
        VersionLock(),
        cache="keep",
        in_flight_update=True,
        report=report,
        relay=relay,
        relay_timeout_s=60.0,
    )
    sync.start()
    tell(ready=True)
    for line in sys.stdin:
        order = json.loads(line)
        engine.stops = order["stops"]
        made = {name: each and WeightTarget(**each) for name, each in order["targets"].items()}
        sync.aim(made["target"], Relaying(level=order["level"], reserve=made["reserve"], keep=order["keep"]))
"""


class Process:
    """A process of the weight plane, driven by lines of JSON."""

    def __init__(self, folder: Path, role: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(folder), role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def read(self) -> dict:
        return json.loads(self.process.stdout.readline())

    def aim(self, target: dict | None, *, reserve: dict | None = None, keep: bool = False, stops: bool = False) -> None:
        order = {"targets": {"target": target, "reserve": reserve}, "level": int(reserve is not None)}
        self.process.stdin.write(json.dumps(order | {"keep": keep, "stops": stops}) + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Process]]:
    """Starts processes, which are gone afterwards."""
    started = []

    def begin(role: str) -> Process:
        started.append(Process(tmp_path, role))
        return started[-1]

    yield begin
    for each in started:
        each.process.send_signal(signal.SIGCONT)
        each.process.kill()
        each.process.communicate()


@pytest.mark.slow
def test_a_replica_whose_parent_dies_or_hangs_meanwhile_reads_from_the_policy(start, tmp_path) -> None:
    policy, parent, child = start("policy"), start("rollout"), start("rollout")
    first, second = policy.read(), policy.read()

    def target(version: int, endpoint: str) -> dict:
        return {"version": version, "digest": first["digest"], "sources": [endpoint], "hosts": ["here"]}

    assert first["digest"] == second["digest"]
    assert parent.read() == child.read() == {"ready": True}
    parent.aim(target(1, first["endpoint"]), keep=True)
    kept = parent.read()
    assert (kept["version"], kept["relayed"]) == (1, 0)

    # The parent hangs: the child notices, and takes the version from the policy.
    parent.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    child.aim(target(1, kept["endpoint"]), reserve=target(1, first["endpoint"]))
    loaded = child.read()
    assert (loaded["version"], loaded["relayed"], loaded["nbytes"]) == (1, 0, kept["nbytes"])
    assert time.monotonic() - began < 30
    parent.process.send_signal(signal.SIGCONT)

    parent.aim(target(2, first["endpoint"]), keep=True)
    kept = parent.read()
    other = start("rollout")
    assert other.read() == {"ready": True}
    other.aim(target(2, kept["endpoint"]), reserve=target(2, first["endpoint"]))
    assert other.read()["relayed"] == kept["nbytes"]

    # The parent is killed while the child reads from it.
    child.aim(target(2, kept["endpoint"]), reserve=target(2, first["endpoint"]), stops=True)
    assert child.read() == {"stopped": True}
    parent.kill()
    (tmp_path / "go").touch()
    loaded = child.read()
    assert (loaded["version"], loaded["relayed"], loaded["digest"]) == (2, 0, first["digest"])


def loads_of(run: Path) -> dict[int, dict[str, WeightsLoaded]]:
    """What each replica loaded, by version."""
    found: dict[int, dict[str, WeightsLoaded]] = defaultdict(dict)
    for _, _, event in entries(run / "journal.sqlite"):
        if isinstance(event, Reported):
            report = REPORT.decode(event.report)
            assert not isinstance(report, WeightsRejected)
            if isinstance(report, WeightsLoaded):
                found[report.version][event.name] = report
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_chain_of_replicas_trains_as_replicas_that_all_read_from_the_policy(
    cosmos: CommandLine, arithmetic: Callable[..., list[str]]
) -> None:
    cosmos("run", *arithmetic("chain", *SETTINGS, "sync.fan_out=1"))
    cosmos("run", *arithmetic("star", *SETTINGS))
    runs = cosmos.folder / "runs"

    chain = loads_of(runs / "chain")
    assert len(chain) == 4
    for version, loads in chain.items():
        # The run is over once the first that has the last version has evaluated it, whoever else still waits for it.
        assert len(loads) == 4 or version == max(chain), version
        (size,) = {load.nbytes for load in loads.values()}
        # The policy sends each version once, and all replicas but the last of the chain pass it on.
        # Before all have joined, nobody knows who will be the first or the last.
        assert sum(load.nbytes - load.relayed for load in loads.values()) == size or version == min(chain)
        assert sum(bool(load.endpoint) for load in loads.values()) == min(3, len(loads)) or version == min(chain)

    star = loads_of(runs / "star")
    assert all(load.relayed == 0 and not load.endpoint for loads in star.values() for load in loads.values())
    assert {v: {load.digest for load in loads.values()} for v, loads in chain.items()} == {
        v: {load.digest for load in loads.values()} for v, loads in star.items()
    }
    first, second = (json.loads((runs / name / "summary.json").read_text()) for name in ("chain", "star"))
    for key in ("outcome", "steps", "evaluations", "samples"):
        assert first[key] == second[key]
