"""Dynamic keys are changed in runs of real processes."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_core.config.loading import load_job
from cosmos_core.control.journal import entries
from cosmos_core.control.machine.events import Reported
from cosmos_core.run.address import read_address
from cosmos_core.run.follower import Follower
from cosmos_core.run.observer import Observer
from cosmos_core.transport.keys import person_key
from cosmos_core.transport.reports import REPORT, WeightsPublished
from tests.commandline import CommandLine
from tests.runs import WHIM

Arguments = Callable[..., list[str]]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SETTINGS = (
    "warmup.steps=2",
    "run.steps=100000",
    "evaluation.prompts=0",
    "policy.replicas=2",
    "policy.prompts_per_step=4",
    "policy.checkpoint.interval=5",
    "rollout.group_size=4",
    "algorithm.options.clip_low=0.9",
    "algorithm.options.clip_high=10",
    "algorithm.options.dual_clip=5.0",
    "policy.optimizer.lr=3e-3",
    "reward=[{plugin='whim'}]",
)


@pytest.fixture
def whim(make_distribution: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process of a run finds the reward."""
    folder = make_distribution("whim-reward", entries={"reward/whim": "whim"}, modules={"whim.py": WHIM})
    monkeypatch.setenv("PYTHONPATH", str(folder))


def followed(run: Path) -> Follower:
    follower = Follower()
    follower.fold(entries(run / "journal.sqlite"))
    return follower


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Wait until a step is done."""
    deadline, address = time.monotonic() + 120, None
    while address is None:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)
        if (run / "controller.json").exists():
            address = read_address(load_job(run))
    job, follower = load_job(run), Follower()
    observer = Observer(address, job.run_id, person_key(job.keys))
    try:
        while len(follower.steps) < step:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            follower.fold(observer.poll(0.2))
    finally:
        observer.close()


def digests(run: Path) -> dict[str, dict[int, str]]:
    """Those of the versions that each policy replica published."""
    found: dict[str, dict[int, str]] = {}
    for _, _, event in entries(run / "journal.sqlite"):
        if isinstance(event, Reported):
            report = REPORT.decode(event.report)
            if isinstance(report, WeightsPublished):
                found.setdefault(event.name, {})[report.version] = report.digest
    return found


@pytest.mark.usefixtures("whim")
def test_changes_hold_from_one_step_on_for_all_replicas(cosmos: CommandLine, arithmetic: Arguments) -> None:
    run = cosmos.folder / "runs" / "steered"
    process = cosmos.start("run", *arithmetic("steered", *SETTINGS))
    wait_for_step(run, 6, process)
    first = cosmos("set", "policy.optimizer.lr=1e-30", "algorithm.options.clip_high=1e-6")
    frozen = int(first.split("from step ")[1].split()[0])
    assert f"policy.optimizer.lr: 0.003 until now, 1e-30 from step {frozen} on" in first
    wait_for_step(run, frozen + 4, process)
    second = cosmos("set", "rollout.sampling.temperature=0.5", "--run", str(run))
    tempered = int(second.split("from step ")[1].split()[0])
    wait_for_step(run, tempered + 8, process)
    assert f"policy.optimizer.lr = 1e-30 since step {frozen} (recipe: 0.003)" in cosmos("status", str(run))
    process.send_signal(2)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output

    records = {timed.record.step: timed.record for timed in followed(run).steps}
    last = len(records)
    # The learning rate, below what float32 keeps: weights stand still from one step on, on both replicas.
    published = digests(run)
    assert published.keys() == {"policy-0", "policy-1"}
    for held in published.values():
        assert len({held[step] for step in range(frozen - 1, last + 1)}) == 1
        assert len({held[step] for step in range(2, frozen)}) == frozen - 2
    assert [step for step, record in records.items() if record.metrics["lr"] < 1e-20] == list(range(frozen, last + 1))
    # The clip range: hardly anything above 1 counts any more, at once.
    clipped = [step for step, record in records.items() if record.settings.get("algorithm.options.clip_high") == 1e-6]
    assert clipped == list(range(frozen, last + 1))
    # Steps whose groups all have equal rewards price nothing.
    priced = [(step, record.metrics) for step, record in records.items() if "clip_fraction" in record.metrics]
    before = [metrics["clip_fraction"] for step, metrics in priced if step < frozen][-1]
    after, metrics = next((step, metrics) for step, metrics in priced if step >= frozen)
    assert after < frozen + 3
    assert metrics["clip_fraction"] > 2 * before
    # The temperature: what the trainer computes is what the engine drew from, before, at and after the change.
    drawn = {step: record.drawn.get("rollout.sampling.temperature=0.5", 0) for step, record in records.items()}
    assert drawn[tempered - 1] == 0
    assert drawn[last] == records[last].num_groups
    assert records[last].settings["rollout.sampling.temperature"] == 0.5
    exact = [record for step, record in records.items() if step > frozen + 3 and "behaviour_kl" in record.metrics]
    assert len(exact) > 8
    assert max(record.metrics["behaviour_kl"] for record in exact) < 1e-6

    summary = json.loads((run / "summary.json").read_text())
    changed = [(each["step"], each["key"], each["after"]) for each in summary["settings"]]
    assert changed == [
        (frozen, "policy.optimizer.lr", 1e-30),
        (frozen, "algorithm.options.clip_high", 1e-6),
        (tempered, "rollout.sampling.temperature", 0.5),
    ]
    assert f"{tempered}" in (run / "report.html").read_text().partition("Settings that were changed")[2]
