"""`make gpu` in its dry form; what is asked of a GPU is asked by the same code (docs/gpu.md)."""

import contextlib
import functools
import io
import json
import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu.qualify import stage
from tests.gpu.qualify.__main__ import parsed
from tests.gpu.qualify.checks import CHECKS, STAGES, Check
from tests.gpu.qualify.report import Report, judged
from tests.gpu.qualify.stage import Budget, run_stage

ROOT = Path(__file__).parents[3]
QUICK = ["test_policy_step", "0.6B, eager", "0.6B, log-probs", "after sleep", "0.6B, publication", "side", "8B, dp"]


def started(*arguments, **variables):
    command = [sys.executable, "-m", "tests.gpu.qualify", *map(str, arguments)]
    paths = os.pathsep.join(filter(None, (variables.pop("PYTHONPATH", ""), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, **variables, "PYTHONPATH": paths}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def qualify(*arguments, **variables):
    process = started(*arguments, **variables)
    said = process.communicate()
    return subprocess.CompletedProcess(arguments, process.returncode, *said)


def figures_of(folder):
    told = json.loads((folder / "gpu-cpu.json").read_text())
    return {stage: {each["name"]: each for each in found["figures"]} for stage, found in told["stages"].items()}, (
        folder / "gpu-cpu.md"
    ).read_text()


@pytest.mark.timeout(900)
def test_every_stage_runs_on_a_cpu(tmp_path):
    done = qualify("--device", "cpu", "--tiny", "--out", tmp_path, "--only", *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
    found, page = figures_of(tmp_path)
    assert list(found) == list(STAGES)
    verdicts = {stage: {each["verdict"] for each in figures.values()} for stage, figures in found.items()}
    assert all("failed" not in each for each in verdicts.values())
    # What is right is judged on a CPU, too; what is fast is told beside its bound.
    assert {stage for stage, each in verdicts.items() if "passed" in each} == {"A", "C", "E", "F"}
    slept = {name: each["verdict"] for name, each in found["C"].items() if "after sleep" in name}
    parts = ("digests that differ", "log-probs, furthest off", "units in flight that are lost")
    assert slept == {
        **{f"0.6B, vLLM after sleep, {how}": "skipped" for how in ("compiled", "eager")},
        **{f"0.6B, embedded after sleep: {part}": "passed" for part in parts},
    }
    speed = found["D"]["0.6B, publication: published to loaded, attested"]
    assert (speed["verdict"], speed["bound"]) == ("measured", "≥ 20 GB/s")
    assert speed["value"] > 0
    assert f"| {speed['name']} |" in page


@pytest.mark.timeout(300)
def test_a_stage_that_fails_stops_no_other(tmp_path):
    planted = tmp_path / "planted" / "serving"
    planted.mkdir(parents=True)
    (planted / "__init__.py").write_text("raise RuntimeError('planted')\n")
    out, asked = tmp_path / "out", ("--stages", "C,D", "--only", "0.6B, log-probs", "0.6B, publication")
    done = qualify("--device", "cpu", "--tiny", "--out", out, *asked, PYTHONPATH=str(planted.parent))
    assert done.returncode == 1
    found, _ = figures_of(out)
    assert found["C"]["0.6B, log-probs"] | {"value": "", "unit": ""} == {
        "name": "0.6B, log-probs", "value": "", "unit": "", "bound": "", "verdict": "failed",
        "note": "RuntimeError: planted",
    }  # fmt: skip
    assert {each["verdict"] for each in found["D"].values()} == {"measured"}
    # Nor does one whose time is up.
    done = qualify("--device", "cpu", "--tiny", "--out", out, *asked, "--stage-minutes", 0.01)
    notes = [each["note"] for figures in figures_of(out)[0].values() for each in figures.values()]
    assert done.returncode == 1
    assert len(notes) == 2
    assert all("the stage's time was up" in note for note in notes)


def marked(mark):
    """What runs with a variable of this value."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


@pytest.mark.timeout(240)
def test_whoever_stops_it_leaves_no_process(tmp_path):
    mark = f"qualified-in-{tmp_path}"
    process = started(
        "--device", "cpu", "--tiny", "--out", tmp_path, "--stages", "E", COSMOS_MARK=mark, TMPDIR=str(tmp_path)
    )
    while not any("cosmos_core.rollout.rewards.worker" in command for command in marked(mark)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate()
    assert (process.returncode, marked(mark)) == (130, []), said
    assert "stopped, and its processes with it" in said


def test_wrong_values_are_refused_and_nothing_run_is_no_success(tmp_path):
    for asked, said in [
        (["--minutes", "0"], "expected minutes, a number above 0, got '0'"),
        (["--minutes=-3"], "expected minutes, a number above 0, got '-3'"),
        (["--stages", "A,,g"], "there is no G; there are A kernels"),
        (["--stages", ","], "names none; there are A kernels"),
    ]:
        with pytest.raises(SystemExit, match="2"), contextlib.redirect_stderr(io.StringIO()) as told:
            parsed(asked)
        assert said in told.getvalue()
    assert parsed(["--stages", "a,, b"]).stages == ["A", "B"]
    every, beyond = ",".join(STAGES), chr(ord(max(STAGES)) + 1)
    for asked, said in [
        ("DEVICE=CPU", "DEVICE= takes cuda or cpu and is CPU"),
        (f"STAGES=A,{beyond}", f"STAGES= takes letters from A to {max(STAGES)}, with commas between them, and is A,"),
        ("STAGES=AB", "and is AB"),
        ("STAGES=,", "and is ,"),
        (f"STAGES={every}", ""),
        ("STAGES=a,, b", ""),
    ]:
        command = ["make", "gpu-asked", "DEVICE=cpu", asked]
        made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (made.returncode, said in made.stdout) == (2 if said else 0, True), made.stdout
    done = qualify("--device", "cpu", "--tiny", "--out", tmp_path, "--minutes", "0.01")
    assert (done.returncode, "nothing has run" in done.stderr) == (1, True)


def test_where_no_gpu_can_be_used_it_says_why(tmp_path):
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho Failed to initialize NVML: Driver/library version mismatch\nexit 18\n")
    command.chmod(0o755)
    done = qualify(CUDA_VISIBLE_DEVICES="", PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert done.returncode == 2
    assert "torch sees none though there is an nvidia-smi" in done.stderr
    assert "Driver/library version mismatch" in done.stderr
    assert "make gpu DEVICE=cpu TINY=1" in done.stderr


class Hanging:
    """A process that begins its check, if at all, and tells no more."""

    def __init__(self, asked, log, *, begins):
        self.lines = [{"begun": asked["checks"][0]}] * begins

    def told(self, deadline):
        if self.lines:
            return self.lines.pop()
        time.sleep(max(0.0, deadline - time.monotonic()))
        raise queue.Empty

    def end(self):
        return -signal.SIGKILL


def test_where_time_is_short_the_most_valuable_comes_first(tmp_path, monkeypatch):
    checks = {
        stage: [Check(name=f"{value}", seconds=60, value=value, call="") for value in (1, 3, 2)] for stage in "AB"
    }
    left_out = Budget.of(checks, minutes=3, stage_s=480, is_tiny=False).left_out
    assert set(left_out) == {("A", "3"), ("B", "2"), ("B", "3")}
    assert "takes about 60 s" in left_out["B", "3"]
    report = Report(folder=tmp_path, name="x", machine={"device": "x"}, titles={"A": "kernels"})
    for budget in (Budget(until=0, stage_s=480, left_out={}), Budget(until=float("inf"), stage_s=0, left_out={})):
        run_stage("A", checks["A"][:1], device="cpu", is_tiny=True, report=report, budget=budget, log=tmp_path)
    assert [each.note for each in report.figures["A"]] == ["the time of --minutes was up", "the stage's time was up"]
    # Whoever gave it no more time is told that no figure came, and that something is wrong only with what hangs.
    minutes, stages = "the time of --minutes was up", "the stage's time was up"
    for begins, seconds, until, verdict, note in [
        (True, 60, 1, "skipped", f"{minutes} while it ran"),
        (True, 60, 480, "failed", f"{stages} while it ran"),
        (True, 0.3, 1, "failed", "not done in 1 s"),
        (False, 60, 1, "skipped", minutes),
        (False, 60, 480, "failed", stages),
    ]:
        monkeypatch.setattr(stage, "_Process", functools.partial(Hanging, begins=begins))
        report = Report(folder=tmp_path, name="x", machine={"device": "x"}, titles={"A": "kernels"})
        budget = Budget(until=time.monotonic() + until, stage_s=1 if until > 1 else 480, left_out={})
        check = Check(name="it", seconds=seconds, value=1, call="")
        run_stage("A", [check], device="cpu", is_tiny=False, report=report, budget=budget, log=tmp_path)
        assert [(each.verdict, each.note) for each in report.figures["A"]] == [(verdict, note)]
    # Two calls of eight minutes hold what matters most.
    first = sum(check.seconds for checks in CHECKS.values() for check in checks if check.value == 1)
    assert first <= 2 * 8 * 60


def test_what_is_no_number_keeps_to_no_bound(tmp_path):
    report = Report(folder=tmp_path, name="x", machine={"device": "x"}, titles={"A": "kernels"})
    for value in (float("nan"), float("inf")):
        report.add("A", judged("loss", value, most=1))
        assert f"| loss | {value} | ≤ 1 | failed |" in report.markdown()
        assert json.loads((tmp_path / "x.json").read_text())["stages"]["A"]["figures"][-1]["verdict"] == "failed"
    assert judged("loss", 0.5, most=1, least=0.1).verdict == "passed"
    assert judged("pause", 43.2, "ms", most=0.5).line == "failed    pause: 43.2 ms (bound: ≤ 0.5 ms)"
    assert judged("loss", 2.0, most=1, is_judged=False).verdict == "measured"
