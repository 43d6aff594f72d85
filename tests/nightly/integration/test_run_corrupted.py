"""A bit of the loaded weights goes wrong in a run of real processes: told, never generated with, and repaired."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_core.control.journal import replay
from tests.commandline import CommandLine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ENGINE = """
import torch
from cosmos_core.protocols import EngineCapabilities, Provider, hookimpl
from cosmos_core.protocols.quantization import FORMATS
from cosmos_core.rollout.embedded.engine import EmbeddedEngine
from cosmos_core.rollout.embedded.options import EmbeddedOptions
from cosmos_core.weights import slices

class Unlucky(EmbeddedEngine):
    commits = 0

    def _apply(self, update, cache):
        self.commits += 1
        if self.commits in (3, 4):
            name = "model.norm.weight"
            bad = self._tensors_to_write()[name].clone()
            bad.view(torch.uint8).flatten()[:1].bitwise_xor_(self.commits)
            update.write(slices.whole(name, tuple(bad.shape)), bad)
        return super()._apply(update, cache)

@hookimpl
def cosmos_engine():
    capabilities = EngineCapabilities(quantizations=frozenset(FORMATS))
    return Provider(create=Unlucky, options=EmbeddedOptions, capabilities=capabilities)
"""


@pytest.mark.parametrize("form", ["none", "nvfp4"])
def test_a_replica_that_loaded_a_wrong_bit_gets_no_prompts_until_it_loaded_the_right_one(
    cosmos: CommandLine,
    arithmetic: Callable[..., list[str]],
    make_distribution: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    form: str,
) -> None:
    folder = make_distribution("unlucky-engine", entries={"engine/unlucky": "unlucky"}, modules={"unlucky.py": ENGINE})
    monkeypatch.setenv("PYTHONPATH", str(folder))
    settings = (
        "warmup.steps=2",
        "run.steps=5",
        "sync.mode=sync",
        "evaluation.prompts=0",
        "rollout.engine.plugin=unlucky",
        f"rollout.quantization={form}",
    )
    cosmos("run", *arithmetic("unlucky", *settings))
    run = cosmos.folder / "runs" / "unlucky"
    assert json.loads((run / "summary.json").read_text())["outcome"] == "finished"
    state = replay(run / "journal.sqlite")
    (rollout,) = (replica for replica in state.replicas.values() if replica.role == "rollout")
    assert rollout.rejections == 2
    said = state.status_details["weights"]
    assert "rollout-0: version" in said
    assert "all that arrived was right, so that it went wrong in the engine" in said
