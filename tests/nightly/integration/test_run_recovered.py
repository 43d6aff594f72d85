"""A run whose journal is damaged between two sessions, and one whose disk is full."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.commandline import CommandLine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

Arguments = Callable[..., list[str]]

SETTINGS = ("warmup.steps=3", "run.steps=3", "evaluation.prompts=4", "policy.checkpoint.interval=2")


def audited(cosmos: CommandLine, run: Path) -> dict[str, object]:
    return dict(json.loads(cosmos("audit", str(run), "--json")))


def test_a_run_with_a_damaged_journal_goes_on_from_its_checkpoint(cosmos: CommandLine, arithmetic: Arguments) -> None:
    cosmos("run", *arithmetic("damaged", *SETTINGS))
    run = cosmos.folder / "runs" / "damaged"
    before = audited(cosmos, run)
    assert before["problems"] == []
    assert [step["step"] for step in before["steps"]] == list(range(1, 7))  # type: ignore[attr-defined]
    assert "Each prompt was consumed exactly once" in cosmos("audit", str(run))
    assert "Step 6 of stage 1" in cosmos("audit", str(run), "--step", "6")

    journal = run / "journal.sqlite"
    content = bytearray(journal.read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    journal.write_bytes(content)
    resumed = ("run", "--resume", str(run), "--set", "run.steps=5")
    assert f"cosmos recover {run}" in cosmos(*resumed, code=1)
    assert "can go on from step 6" in cosmos("recover", str(run))
    cosmos(*resumed)
    after = audited(cosmos, run)
    assert after["problems"] == []
    assert [step["step"] for step in after["steps"]] == [7, 8]  # type: ignore[attr-defined]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["outcome"], summary["steps"]) == ("finished", 8)
    assert len(list(run.glob("journal.sqlite.damaged-*"))) >= 1


@pytest.fixture
def small_disk(cosmos: CommandLine) -> Iterator[Path]:
    """A file system of its own that is full after a part of a megabyte."""
    place = cosmos.folder / "small"
    place.mkdir()
    command = ("mount", "-t", "tmpfs", "-o", "size=640k", "tmpfs", str(place))
    mounted = subprocess.run(command, check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a small disk needs the right to mount one: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk_ends_the_run_and_says_so(cosmos: CommandLine, arithmetic: Arguments, small_disk: Path) -> None:
    ballast = (f"policy.checkpoint.url='{cosmos.folder / 'checkpoints'}'", f"run.output_dir='{small_disk}'")
    said = cosmos("run", *arithmetic("full", *SETTINGS, "run.steps=500", *ballast), code=1)
    run = small_disk / "full"
    assert "free some space on this disk" in " ".join(said.split())
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    # What had been told to the replicas is all in the journal: it adds up.
    assert audited(cosmos, run)["problems"] == []
