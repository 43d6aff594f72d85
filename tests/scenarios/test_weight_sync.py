"""Weights travel as the recipe says, quantised or not, and arrive as they were published."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from cosmos_core.control.journal import replay
from tests.commandline import CommandLine
from tests.runs import arithmetic

pytestmark = pytest.mark.timeout(400)

SETTINGS = (
    "warmup.steps=12",
    "run.steps=4",
    "evaluation.interval=0",
    "evaluation.prompts=4",
    "sync.mode=sync",
    "rollout.precision=fp32",
    "rollout.replicas=2",
    "policy.mesh.dp_shard=2",
    "reward=[{plugin='whim'}]",
)
QUANTISED = "rollout.quantization=fp8"


@pytest.fixture(scope="module")
def stored(cosmos: CommandLine) -> Path:
    """The folder that weights go through."""
    return cosmos.folder / "weights"


@pytest.fixture(scope="module")
def synced(cosmos: CommandLine, runs: Path, stored: Path) -> dict[str, Path]:
    """A run of each transport; those in 8 bits go by gloo and by a disk."""
    ways = {
        "shared": (),
        "gloo": ("sync.transport=gloo", QUANTISED),
        "disk": ("sync.transport=disk", f"sync.directory='{stored}'", QUANTISED),
    }
    for name, way in ways.items():
        cosmos("run", *arithmetic(name, *SETTINGS, *way))
    return {name: runs / name for name in ways}


def logged(folder: Path, replica: str) -> Sequence[str]:
    """What a replica said of where its weights came from."""
    lines = [json.loads(line) for line in (folder / "logs" / f"{replica}.jsonl").read_text().splitlines()]
    return [line["message"] for line in lines if " comes " in line.get("message", "")]


def test_all_finish_and_no_weights_are_rejected(synced: dict[str, Path]) -> None:
    for name, run in synced.items():
        assert json.loads((run / "summary.json").read_text())["outcome"] == "finished", name
        assert not any(replica.rejections for replica in replay(run / "journal.sqlite").replicas.values()), name


def test_each_replica_says_where_its_weights_came_from(synced: dict[str, Path], stored: Path) -> None:
    expected = {"gloo": " over gloo from 2 process(es), tcp://", "disk": f" from 2 part(s) in {stored}"}
    for name, said in expected.items():
        for replica in ("rollout-0", "rollout-1"):
            messages = logged(synced[name], replica)
            assert len(messages) >= 2
            assert all(said in message for message in messages)


def test_a_disk_keeps_the_versions_that_somebody_may_still_want(synced: dict[str, Path], stored: Path) -> None:
    (run,) = stored.iterdir()
    kept = {int(version.name[1:].partition("-")[0]) for version in run.iterdir()}
    assert max(kept) == max(replay(synced["disk"] / "journal.sqlite").published)
    assert len(kept) <= 3


def test_eight_bits_are_trained_on_as_generated_and_their_distance_is_shown(synced: dict[str, Path]) -> None:
    mismatch, nbytes = {}, {}
    for name, run in synced.items():
        state = replay(run / "journal.sqlite")
        measured = [record.metrics["mismatch_kl"] for record in state.steps if "mismatch_kl" in record.metrics]
        assert len(measured) == 4
        mismatch[name] = max(map(abs, measured))
        (nbytes[name],) = {published.nbytes for published in state.published.values()}
    assert mismatch["shared"] < 1e-6
    # 2 layers: float32 becomes a byte, and 4 bytes a row.
    rows = 2 * (96 + 48 + 48 + 96 + 256 + 256 + 96)
    elements = 2 * (2 * 96 * 96 + 2 * 48 * 96 + 3 * 256 * 96)
    for name in ("gloo", "disk"):
        assert 1e-6 < mismatch[name] < 0.05
        assert nbytes["shared"] - nbytes[name] == 3 * elements - 4 * rows


def test_the_plan_shows_and_checks_transport_and_format(cosmos: CommandLine) -> None:
    planned = " ".join(cosmos("plan", *arithmetic("planned", "rollout.quantization=mxfp4")).split())
    assert "weights travel shared memory: launch.launcher 'local' starts every process" in planned
    assert "matrices in mxfp4" in planned
    assert "sync.transport: 'nccl'" in cosmos("plan", *arithmetic("refused", "sync.transport=nccl"), code=2)
    assert "sync.directory" in cosmos("plan", *arithmetic("refused", "sync.transport=disk"), code=2)
    refused = cosmos("plan", *arithmetic("refused", "rollout.quantization=int4"), code=2)
    assert "rollout.quantization" in refused
    assert "mxfp4" in refused
