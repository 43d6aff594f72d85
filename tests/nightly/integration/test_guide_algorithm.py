"""The algorithm of the author's guide, as it stands there, is a package that a run takes by name."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.commandline import CommandLine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

GUIDE = Path(__file__).parents[3] / "docs" / "plugins" / "algorithm.md"
MODULE = re.compile(r"^% tested\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The guide's module, installed."""
    found = MODULE.search(GUIDE.read_text())
    assert found is not None
    folder = tmp_path / "site"
    info = folder / "leave_one_out-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "leave_one_out.py").write_text(found[1])
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: leave-one-out\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[cosmos_core.algorithms]\nleave-one-out = leave_one_out\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))
    return found[1]


def test_it_runs_by_name(cosmos: CommandLine, arithmetic, guide: str) -> None:
    assert guide.count("\n") <= 60
    cosmos("run", *arithmetic("guide", "run.steps=3"), "--algorithm", "leave-one-out")
    run = cosmos.folder / "runs" / "guide"
    assert json.loads((run / "summary.json").read_text())["outcome"] == "finished"
    assert "leave-one-out" in (run / "manifest.json").read_text()
