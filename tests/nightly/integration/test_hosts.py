"""Runs over several hosts, whose cables are pulled while they go on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import attrs
import pytest
import zmq

from cosmos_core.config.job import Job
from cosmos_core.config.loading import load_recipe
from cosmos_core.control.journal import entries
from cosmos_core.control.machine.events import Event, ReplicaJoined, ReplicaLost, Reported
from cosmos_core.control.machine.state import State
from cosmos_core.run import folder, provenance
from cosmos_core.run.address import announced
from cosmos_core.run.follower import Follower
from cosmos_core.run.observer import Observer
from cosmos_core.run.planning.plan import make_plan
from cosmos_core.transport import key_folder as keys
from cosmos_core.transport import payload_client, sockets
from cosmos_core.transport.keys import person_key
from cosmos_core.transport.payloads import PayloadClient
from cosmos_core.transport.reports import REPORT, GenerationFormed, StepDone
from cosmos_service_tools.auditor import audit
from tests.nightly.integration.hosts import Network, lacking, network

RECIPE = Path(__file__).parents[3] / "recipes" / "arithmetic.toml"
NAMES = ("alpha", "bravo", "charlie", "delta", "echo", "foxtrot")
WARMUP, STEPS = 4, 12
CUT_AT = WARMUP + 2
LOST_AFTER_S = 4
SETTINGS = (
    "run.name=hosts",
    f"run.steps={STEPS}",
    f"warmup.steps={WARMUP}",
    "evaluation.prompts=0",
    "evaluation.interval=0",
    "policy.replicas=2",
    "policy.mesh.dp_shard=2",
    "policy.checkpoint.interval=0",
    "policy.prompts_per_step=8",
    # One long group after another: at any time in a step there are prompts that wait for the rollout replica.
    "rollout.replicas=2",
    "rollout.group_size=4",
    "rollout.max_in_flight=4",
    "rollout.sampling.max_units=96",
    # Then no step passes while one of them is cut off.
    "sync.mode=sync",
    "control.bind='10.77.0.1'",
    "control.keys='keys'",
    "control.heartbeat_s=0.4",
    f"control.lost_after_s={LOST_AFTER_S}",
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(lacking()), reason=lacking() or "there can be hosts here"),
]


class Run:
    """A run whose controller is on the first of some hosts, and is watched from there.

    Args:
        place: Folder that all hosts see.
        hosts: Where it runs.
    """

    def __init__(self, place: Path, hosts: Network) -> None:
        keys.make(place / "keys", keys.USUAL)
        shutil.copy(RECIPE, place / "recipe.toml")
        (place / "staging").mkdir()
        recipe = load_recipe(place / "recipe.toml", overrides=[*SETTINGS, f"run.output_dir='{place}/runs'"])
        plan = make_plan(recipe, place / "recipe.toml", place / "staging")
        folder.create(plan.job, plan.assets, provenance.made_with(plan.plugins, plan.assets), overwrite=False)
        self.job: Job = plan.job
        self._place, self._hosts = place, hosts
        self._follower = Follower()
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self.controller = self.start("alpha", "cosmos_core.control", "--run", str(self.job.directory))
        wait_until(lambda: announced(self.job) is not None, 60.0)
        self.address = announced(self.job).address
        with self._hosts["alpha"].network():
            self._observer = Observer(self.address, self.job.run_id, person_key(self.job.keys))
        return self

    def __exit__(self, *_: object) -> None:
        self._observer.close()
        for process in self._started:
            process.kill()
            process.wait()

    def start(self, host: str, *words: str) -> subprocess.Popen[bytes]:
        """Start a module on a host; `said` has what it prints."""
        command = self._hosts[host].command(sys.executable, "-P", "-m", *words, folder=self._place)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "120"}
        with (self._place / f"{host}.txt").open("ab") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
            )
        self._started.append(process)
        return process

    def said(self, host: str) -> str:
        """What was printed on a host."""
        return (self._place / f"{host}.txt").read_text()

    def log(self, name: str) -> str:
        """The log of a process."""
        return (self.job.logs / f"{name}.jsonl").read_text()

    def until(self, happened: Callable[[State], bool]) -> None:
        """Follow the run until something is so; it fails if the run ends before."""

        def look() -> bool:
            self._follower.fold(self._observer.poll(0.05))
            state = self._follower.state
            if state is not None and happened(state):
                return True
            assert state is None or not state.outcome, (state.outcome, state.reason)
            assert self.controller.poll() is None, self.said("alpha")
            return False

        wait_until(look, 240.0, lambda: str(self._follower.state))


def wait_until(condition: Callable[[], bool], timeout_s: float, seen: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, seen()
        time.sleep(0.01)


def test_what_is_cut_off_is_done_without_and_the_run_finishes(tmp_path):
    with network(tmp_path / "names", *NAMES) as hosts, Run(tmp_path, hosts) as run:
        home = str(run.job.directory)
        # One replica of two processes on two hosts, as a cluster's launcher starts them.
        for rank, host in enumerate(("bravo", "charlie")):
            name = ("--name", "policy-0.1" if rank else "policy-0", "--rank", str(rank), "--session", "of this test")
            run.start(host, "cosmos_core.policy", "--run", home, "--controller", run.address, *name)
        run.start("delta", "cosmos_core.cli", "replica", "policy", "--run", home, "--name", "policy-1")
        run.start("echo", "cosmos_core.cli", "replica", "rollout", "--run", home, "--name", "rollout-0")
        reached = ("--controller", run.address, "--name", "rollout-1")
        run.start("foxtrot", "cosmos_core.cli", "replica", "rollout", *reached)

        run.until(lambda state: state.step >= CUT_AT and len(state.replicas["rollout-1"].leases) > 2)
        hosts.cut("foxtrot")
        run.until(lambda state: "rollout-1" not in state.replicas)
        # A step is about to begin, or has begun.
        run.until(lambda state: len(state.ledger.finished) > 5)
        hosts.cut("delta")
        hosts.mend("foxtrot")
        run.until(lambda state: "policy-1" not in state.replicas)
        run.until(lambda state: bool(state.outcome))
        assert run.controller.wait(30) == 0

        history = [event for _, _, event in entries(run.job.journal)]
        check_losses(history)
        check_generations(history)
        found = audit(entries(run.job.journal))
        assert not found.problems
        assert "comes over zmq from 2 process(es), tcp://10.77.0." in run.log("rollout-0")
        assert f"silent for {LOST_AFTER_S} s (control.lost_after_s)" in run.said("foxtrot")
        assert re.search("generation 1: (interrupted in a collective|a collective failed)", run.log("policy-0"))


def check_losses(history: list[Event]) -> None:
    """Both were fenced for their silence; what the rollout replica had in flight was made by others."""
    follower = Follower()
    lost = {}
    for sequence, event in enumerate(history, start=1):
        if isinstance(event, ReplicaLost) and event.name not in lost:
            lost[event.name] = (event, len(follower.state.replicas[event.name].leases))
        follower.fold([(sequence, 0.0, event)])
    assert set(lost) == {"rollout-1", "policy-1"}
    assert all(f"silent for {LOST_AFTER_S} s" in event.reason for event, _ in lost.values())
    assert lost["rollout-1"][1] > 0
    state = follower.state
    assert (state.outcome, [record.step for record in state.steps]) == ("finished", [*range(1, WARMUP + STEPS + 1)])
    joined = {event.name: event for event in history if isinstance(event, ReplicaJoined)}
    assert {event.host.partition("/")[0] for event in joined.values()} == {"bravo", "delta", "echo", "foxtrot"}
    assert all("tcp://10.77.0." in place for event in joined.values() for place in event.endpoints.values())


def check_generations(history: list[Event]) -> None:
    """Two replicas trained, and the one that was left did again what they could not finish."""
    said = [(event.name, REPORT.decode(event.report)) for event in history if isinstance(event, Reported)]
    formed = [(name, report.generation) for name, report in said if isinstance(report, GenerationFormed)]
    assert set(formed) == {("policy-0", 1), ("policy-1", 1), ("policy-0", 2)}
    steps = {
        name: [report.step for each, report in said if isinstance(report, StepDone) and each == name]
        for name, _ in formed
    }
    assert CUT_AT <= max(steps["policy-1"]) < WARMUP + STEPS
    assert steps["policy-0"] == [*range(1, WARMUP + STEPS + 1)]


SERVER = """
    import sys, time
    from cosmos_core.transport.addresses import own_address
    from cosmos_core.transport.payloads import PayloadServer
    from cosmos_core.types import Array, Payload
    with PayloadServer(own_address("0.0.0.0", sys.argv[1])) as server:
        server.put(1, [Payload(kind="tokens", arrays={"x": Array(dtype="uint8", shape=(4,), data=b"four")})])
        print(server.endpoint, flush=True)
        time.sleep(600)
"""


def test_who_fetches_from_a_host_that_is_cut_off_gives_up_soon_and_finds_it_again(tmp_path, monkeypatch):
    monkeypatch.setattr(payload_client, "_ABSENT_S", 1.0)
    monkeypatch.setattr(payload_client, "_LIMITS", attrs.evolve(payload_client._LIMITS, cut_ms=1000))
    with network(tmp_path / "names", "alpha", "bravo") as hosts:
        command = hosts["bravo"].command(sys.executable, "-c", textwrap.dedent(SERVER), hosts["alpha"].address)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            endpoint = server.stdout.readline().strip()
            assert endpoint.startswith("tcp://10.77.0.2:")
            with hosts["alpha"].network(), PayloadClient() as client:
                assert list(client.fetch({endpoint: [1]}, 10)) == [1]
                hosts.cut("bravo")
                start = time.monotonic()
                # Once over the connection that there was, once over none.
                assert client.fetch({endpoint: [1]}, 60) == client.fetch({endpoint: [1]}, 60) == {}
                assert time.monotonic() - start < 30
                hosts.mend("bravo")
                assert list(client.fetch({endpoint: [1]}, 30)) == [1]
            server.kill()


LISTENER = """
    import sys, zmq
    from cosmos_core.transport import sockets
    server = sockets.router(zmq.Context(), sys.argv[1], 0, events=zmq.EVENT_DISCONNECTED)
    print(sockets.address_of(server), flush=True)
    server.recv_multipart()
    print("heard", flush=True)
    monitor = server.get_monitor_socket()
    print("closed" if monitor.poll(int(sys.argv[2])) else "open", flush=True)
"""


def test_an_idle_connection_to_a_host_that_is_gone_is_closed(tmp_path):
    with network(tmp_path / "names", "alpha", "bravo") as hosts, zmq.Context() as context:
        alpha = hosts["alpha"]
        program = textwrap.dedent(LISTENER)
        with subprocess.Popen(
            alpha.command(sys.executable, "-c", program, alpha.address, "40000"), stdout=subprocess.PIPE, text=True
        ) as listener:
            with hosts["bravo"].network():
                client = sockets.dealer(context, listener.stdout.readline().strip(), b"x", queued=True)
            sockets.offer(client, [b"hello"])
            assert listener.stdout.readline() == "heard\n"
            hosts.cut("bravo")
            assert listener.stdout.readline() == "closed\n"
            client.close()


WHERE = "from cosmos_core.transport.addresses import own_address; print(own_address({arguments}))"


def test_a_host_of_several_networks_is_reached_where_its_peer_is(tmp_path):
    with network(tmp_path / "names", "alpha") as hosts:
        alpha = hosts["alpha"]

        def where(*arguments: str, chosen: str = "") -> str:
            program = WHERE.format(arguments=", ".join(map(repr, arguments)))
            return alpha("env", f"COSMOS_HOST={chosen}", sys.executable, "-c", program).strip()

        # Its name means loopback, and there is no default route.
        assert where("0.0.0.0") == "10.77.0.1"
        alpha("ip", "link", "add", "ib0", "type", "veth", "peer", "name", "ib1")
        alpha("ip", "address", "add", "10.88.0.1/24", "dev", "ib0")
        alpha("ip", "link", "set", "ib0", "up")
        assert where("0.0.0.0", "10.77.0.9") == "10.77.0.1"
        assert where("10.88.0.9", "10.88.0.9") == "10.88.0.1"
        with pytest.raises(
            AssertionError, match=r"no default route and several addresses \(10\.77\.0\.1, 10\.88\.0\.1\)"
        ):
            where("0.0.0.0")
        assert where("0.0.0.0", chosen="ib0") == "10.88.0.1"
        with pytest.raises(AssertionError, match=r"does not reach 203\.0\.113\.7"):
            where("0.0.0.0", "203.0.113.7")
