"""Everything that a live run and its reward service listen on, among malformed frames and requests: the run goes on.

Each socket is found by looking at the processes, so none is forgotten. All attackers speak at once, while people watch
the run and are given scores; what was tried, how it was answered, and what it cost is printed.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import http.client
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import attrs
import psutil
import pytest

from cosmos_core.control.journal import entries
from cosmos_core.control.machine.events import Commanded, ReplicaJoined
from cosmos_core.control.machine.state import State
from cosmos_core.transport.messages import Stop
from cosmos_service_tools.auditor import audit
from tests.commandline import CommandLine
from tests.following import Following
from tests.nightly.fuzz.attackers import Answers, Place
from tests.nightly.fuzz.frames import NOBODY
from tests.nightly.fuzz.targets import Target, Targets, listening, place_of
from tests.nightly.integration.reward_service import CONFIG, Serving, body, serving
from tests.runs import RECIPE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

OVERRIDES: Final = (
    "warmup.steps=12",
    "run.steps=1000000",
    "evaluation.prompts=0",
    "policy.prompts_per_step=2",
    "policy.mesh.dp_shard=2",
    "rollout.replicas=2",
    "rollout.group_size=4",
    "rollout.max_in_flight=32",
    "rollout.sampling.max_units=8",
    "sync.transport=zmq",
    "sync.fan_out=1",
    "control.lost_after_s=60",
)
"""Little work, and all that listens: a page, payloads, weights of two processes and of one who passes them on."""
WINDOW_S: Final = 8.0
SCORED_WITHIN_S: Final = 120.0
KEPT: Final = CONFIG.replace("keep_s = 2.0", f"keep_s = {SCORED_WITHIN_S}").replace(
    "forget_s = 3.0", "forget_s = 300.0"
)
"""A client on a busy machine may come for its result seconds late; one that has expired is answered with 410."""


class Client(threading.Thread):
    """Somebody with every right, who asks again and again until told to stop, and notes how long each answer took."""

    def __init__(self, name: str, ask: Callable[[], None], pause_s: float = 0.5) -> None:
        super().__init__(name=name, daemon=True)
        self.ask = ask
        self.pause_s = pause_s
        self.over = threading.Event()
        self.waits: list[float] = []
        self.fault: Exception | None = None

    def run(self) -> None:
        try:
            while not self.over.wait(self.pause_s):
                began = time.monotonic()
                self.ask()
                self.waits.append(time.monotonic() - began)
        except Exception as error:  # noqa: BLE001 - told by the test
            self.fault = error

    def end(self) -> None:
        self.over.set()
        self.join(SCORED_WITHIN_S + 60.0)
        assert not self.is_alive(), f"{self.name} has waited for an answer for too long"
        assert self.fault is None, f"{self.name}: {self.fault!r}"
        assert self.waits, f"{self.name} was never answered"


def look_at_page(place: Place) -> None:
    connection = http.client.HTTPConnection(*place, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", "/api/snapshot")
        answer = connection.getresponse()
        assert (answer.status, b"step" in answer.read()) == (200, True)


def be_scored(service: Serving) -> None:
    status, said, _ = service.enqueue(body(7))
    assert status == 202, said
    ticket, until = said["id"], time.monotonic() + SCORED_WITHIN_S
    # 202 is "pending, ask again": the service lets nobody wait longer than it says, and others are before.
    while status == 202 and time.monotonic() < until:
        status, said = service.fetch(ticket, 30)
    assert status == 200, (status, said)
    assert said["scores"]["sees"][0].get("value") == 7.0, said


@contextlib.contextmanager
def clients(page: Place, service: Serving) -> Iterator[list[Client]]:
    """A reader of the page, one of its stream of events, which stays, and one who has videos scored."""
    stream = http.client.HTTPConnection(*page, timeout=60)
    stream.request("GET", "/api/events")
    answer = stream.getresponse()
    assert answer.status == 200

    def read_event() -> None:
        while answer.fp.readline() not in (b"\n", b""):
            pass

    found = [
        Client("page", functools.partial(look_at_page, page)),
        Client("event stream", read_event, pause_s=0.0),
        Client("reward client", functools.partial(be_scored, service)),
    ]
    for each in found:
        each.start()
    try:
        yield found
    finally:
        for each in found:
            each.over.set()
            each.join(60)
        stream.close()


@attrs.frozen(kw_only=True)
class Pace:
    """Steps in a while."""

    steps: int
    wall_s: float
    cpu_s: float

    @property
    def per_s(self) -> float:
        return self.steps / self.wall_s

    @property
    def cpu_per_step(self) -> float:
        return self.cpu_s / max(1, self.steps)

    def __str__(self) -> str:
        return f"{self.per_s:.1f} steps/s, {self.cpu_per_step * 1000:.0f} ms CPU a step ({self.wall_s:.0f} s)"


@attrs.frozen
class Usage:
    """Bytes of memory, open files, and connections of strangers at torch's sockets, of a process."""

    memory: int
    files: int
    kept: int


class Watched:
    """The processes of the run and the service, and how they fare."""

    def __init__(self, following: Following, service: Serving) -> None:
        self.following = following
        self.run = psutil.Process(following.process.pid)
        self.service = psutil.Process(service.process.pid)
        self.names = {
            following.pid(name): name for name in ("controller", "policy-0", "rollout-0", "rollout-1", "fork server")
        }
        self.names |= {self.run.pid: "cosmos run", self.service.pid: "reward service"}
        forked = psutil.Process(following.pid("fork server")).children()
        self.names |= {each.pid: "policy-0.1" for each in forked if each.pid not in self.names}
        self.before = self.usage([])

    @property
    def processes(self) -> list[psutil.Process]:
        return [each for root in (self.run, self.service) for each in (root, *root.children(recursive=True))]

    def usage(self, targets: list[Target]) -> dict[psutil.Process, Usage]:
        """What each process takes; connections that torch keeps open are counted apart."""
        kept = {each.place for each in targets if each.lets_wait}
        found = {}
        for each in self.processes:
            strangers = [
                one
                for one in each.net_connections(kind="tcp")
                if one.status != psutil.CONN_LISTEN and one.laddr in kept
            ]
            found[each] = Usage(each.memory_info().rss, each.num_fds() - len(strangers), len(strangers))
        return found

    def name(self, process: psutil.Process) -> str:
        """A replica's name, or the module that it runs."""
        if process.pid not in self.names:
            module = re.search(r"(cosmos_core[\w.]+|(?<=multiprocessing\.)\w+)", " ".join(process.cmdline()))
            self.names[process.pid] = module[0].removeprefix("cosmos_core.") if module else str(process.pid)
        return self.names[process.pid]

    def pace(self, goes_on: Callable[[float], bool]) -> Pace:
        """The run's pace for as long as it is to be looked at, which is told the seconds so far."""
        began, cpu, first = time.monotonic(), self.cpu_s(), self.following.state.step
        while goes_on(time.monotonic() - began):
            assert self.following.process.poll() is None, self.following.process.communicate()[0]
            self.following.look()
        return Pace(
            steps=self.following.state.step - first,
            wall_s=time.monotonic() - began,
            cpu_s=self.cpu_s() - cpu,
        )

    def cpu_s(self) -> float:
        used = [each.cpu_times() for each in (self.run, *self.run.children(recursive=True))]
        return sum(each.user + each.system for each in used)


@contextlib.contextmanager
def live(folder: Path) -> Iterator[tuple[CommandLine, Following]]:
    """A run that trains."""
    cosmos = CommandLine(folder, timeout_s=600)
    pairs = [argument for override in OVERRIDES for argument in ("--set", override)]
    process = cosmos.start("run", str(RECIPE), "--name", "fuzzed", *pairs)
    try:
        with Following(folder / "runs" / "fuzzed", process) as following:
            kept = folder / "runs" / "fuzzed" / "samples"
            following.until(
                # The first samples are written with libraries that a replica imports for that: before it is measured.
                lambda state: (
                    state.step >= 40 and len(state.replicas) == 3 and len(list(kept.glob("samples.*.parquet"))) == 2
                ),
                within_s=600,
            )
            yield cosmos, following
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
        for each in cosmos.left_behind():
            each.kill()


def besiege(targets: list[Target], watched: Watched) -> Pace:
    """Let all attackers speak at once; the run's pace meanwhile."""
    with ThreadPoolExecutor(len(targets)) as pool:
        work = [pool.submit(each.assail) for each in targets]
        during = watched.pace(lambda _: not all(each.done() for each in work))
        for each in work:
            each.result()
    return during


@pytest.mark.parametrize("count", [100_000, pytest.param(1_000_000, marks=pytest.mark.sweep)])
def test_a_live_run_and_a_reward_service_go_on_among_malformed_frames_and_requests(tmp_path, capsys, count):
    for name in ("service", "run"):
        (tmp_path / name).mkdir()
    with live(tmp_path / "run") as (cosmos, following), serving(tmp_path / "service", KEPT) as service:
        # What it says is read at its end; whatever is more than a pipe holds would stop it.
        fcntl.fcntl(service.process.stdout, fcntl.F_SETPIPE_SZ, 1 << 20)
        run, page = tmp_path / "run" / "runs" / "fuzzed", place_of(str(following.controller["page"]))
        targets = Targets(run, following, service)
        watched = Watched(following, service)
        targets = targets.of(listening(watched.processes), count)
        before = watched.pace(lambda s: s < WINDOW_S)
        with clients(page, service) as people:
            during = besiege(targets, watched)
            for each in people:
                each.end()
        after = watched.pace(lambda s: s < WINDOW_S)
        now = watched.usage(targets)
        with capsys.disabled():
            print(report(targets, people, watched, now, (before, during, after)))
        check_answers(targets, count)
        check_processes(watched, now, (before, during, after))
        check_state(following.state)
        look_at_page(page)
        be_scored(service)
        following.observer.ask(Stop(), "of the test")
        following.until(lambda state: state.outcome == "stopped", within_s=120)
        output = following.process.communicate(timeout=120)[0]
    assert "Traceback" not in output
    assert len(service.output) < 4_096, service.output[:4_096]
    check_journal(run)
    check_logs(run)
    assert not cosmos.left_behind()


def check_answers(targets: list[Target], count: int) -> None:
    """Everything was thrown, nobody without right was let in, nothing failed, and whoever is slow was cut off."""
    found = {(each.name, what, said) for each in targets for what, a in each.answers.items() for said in a}
    assert sum(answers.total() for each in targets for answers in each.answers.values()) == count
    assert not [each for each in found if "let in" in each[2] or each[2] == "500"]
    assert [(each.name, each.num_cut) for each in targets if each.num_cut[1]] == []


def check_processes(watched: Watched, now: dict[psutil.Process, Usage], paces: tuple[Pace, Pace, Pace]) -> None:
    """Nobody died, was started again, keeps what it was sent or said, or is slower than before."""
    assert now.keys() == watched.before.keys()
    for process, usage in now.items():
        was = watched.before[process]
        assert usage.memory - was.memory < 48 << 20, watched.name(process)
        assert usage.files - was.files < 64, watched.name(process)
    before, during, after = paces
    # Others may have the machine at any time, so what a step costs is compared more narrowly than how long it takes.
    assert during.per_s > 0.02 * before.per_s
    assert after.per_s > 0.25 * before.per_s
    assert after.cpu_per_step < 2 * before.cpu_per_step


WORDS: Final = (NOBODY, "run-of-others", "run-of-nobody", "nobody", "of before")


def check_state(state: State) -> None:
    """The run knows nothing of the attackers."""
    assert (state.fenced, state.draining, state.departed, state.commands) == ({}, set(), set(), set())
    assert not [word for word in WORDS if word in repr(state)]


def check_journal(run: Path) -> None:
    """Nothing of the attackers was written down, and it adds up."""
    history = [event for _, _, event in entries(run / "journal.sqlite")]
    assert [each.ident for each in history if isinstance(each, Commanded)] == ["of the test"]
    assert sum(isinstance(each, ReplicaJoined) for each in history) == 3
    assert not [word for each in history for word in WORDS if word in repr(each)]
    assert not audit(entries(run / "journal.sqlite")).problems


def check_logs(run: Path) -> None:
    """Warnings become ever fewer, and nothing is told with a traceback."""
    for log in (run / "logs").iterdir():
        text = log.read_text()
        told = [line for line in text.splitlines() if '"INFO"' not in line]
        assert sum(map(len, told)) < 64 << 10, log
        assert "Traceback" not in text, log


def report(
    targets: list[Target],
    people: list[Client],
    watched: Watched,
    now: dict[psutil.Process, Usage],
    paces: tuple[Pace, Pace, Pace],
) -> str:
    """What was tried and how it was answered, what each process takes, and the run's pace."""
    thrown: dict[tuple[str, str], Answers] = {}
    slow: Counter[str] = Counter()
    for target in targets:
        slow[target.name] += target.num_cut[0]
        for what, answers in target.answers.items():
            thrown.setdefault((target.name, what), Counter()).update(answers)
    lines = [f"{sum(map(Counter.total, thrown.values())):,} frames and requests at {len(targets)} sockets"]
    for (name, what), answers in thrown.items():
        said = ", ".join(f"{answer} {number:,}" for answer, number in answers.most_common())
        lines.append(f"{name:24} {what:26} {answers.total():7,}  {said}")
    lines += [f"{name:24} slow clients, cut off      {cut:7,}" for name, cut in slow.items()]
    lines += [f"{each.name:24} {len(each.waits)} answers, after {max(each.waits):.1f} s at most" for each in people]
    for process, usage in now.items():
        was = watched.before[process]
        lines.append(
            f"{watched.name(process):24} {was.memory / 2**20:5.0f} -> {usage.memory / 2**20:5.0f} MiB, "
            f"{was.files} -> {usage.files} files, of strangers at torch's sockets {usage.kept}"
        )
    lines += [f"{when:24} {pace}" for when, pace in zip(("before", "during", "after"), paces, strict=True)]
    return "\n" + "\n".join(lines)
