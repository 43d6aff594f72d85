"""World models learn in whole runs: from videos, and from rewards by each algorithm, from one warmed-up model."""

from __future__ import annotations

import http.server
import json
import os
import runpy
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from cosmos_core.control.journal import replay
from cosmos_core.run.supervisor import reserved
from tests.commandline import CommandLine
from tests.processes import ForkedCommandLine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RECIPES = Path(__file__).parents[3] / "recipes" / "wfm"
SHORT = ("evaluation.prompts=16", "evaluation.interval=0", "rollout.group_size=8")


def settings(*pairs: str) -> list[str]:
    return [argument for pair in pairs for argument in ("--set", pair)]


@pytest.fixture(scope="module")
def warmed_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    """A folder with recipes that begin with a model which has seen the videos, and have no warm-up."""
    command = ForkedCommandLine(tmp_path_factory.mktemp("world"), timeout_s=400.0)
    quick = settings("run.steps=160", "evaluation.interval=0", "evaluation.prompts=16")
    command("run", str(RECIPES / "wan-tiny-sft.toml"), *quick)
    command("export", "runs/wan-tiny-sft")
    for path in RECIPES.glob("wan-tiny-*.toml"):
        recipe = tomllib.loads(path.read_text())
        recipe.pop("warmup", None)
        del recipe["model"]["config"]
        recipe["model"]["path"] = str(command.folder / "runs" / "wan-tiny-sft" / "export")
        (command.folder / path.name).write_text(tomli_w.dumps(recipe))
    yield command
    assert not command.left_behind()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The recipes' reward service, in the environment of the runs."""
    with reserved("127.0.0.1", 0) as port, pytest.MonkeyPatch.context() as patch:
        patch.setenv("WFM_REWARD_TOKEN", "a token of this test")
        patch.setenv("WFM_REWARD_ENQUEUE_URL", f"http://127.0.0.1:{port}/v1/enqueue")
        patch.setenv("WFM_REWARD_FETCH_URL", f"http://127.0.0.1:{port}/v1/fetch")
        arguments = ("reward-service", "--config", str(RECIPES / "rewards.toml"), "--port", str(port))
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cosmos_core.cli", *arguments], env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            wait_for_health(process, f"http://127.0.0.1:{port}/health")
            yield
        finally:
            process.terminate()
            process.wait(60)


def wait_for_health(process: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + 150.0
    while True:
        assert process.poll() is None, f"the service ended with {process.returncode}"
        try:
            with urllib.request.urlopen(url, timeout=5.0):
                return
        except OSError:
            assert time.monotonic() < end, f"{url} does not answer"
            time.sleep(0.2)


def run(command: CommandLine, name: str, *pairs: str) -> tuple[dict[str, Any], list[Any]]:
    """What a run came to, and its steps."""
    command("run", f"{name}.toml", *settings(*SHORT, *pairs))
    folder = command.folder / "runs" / name
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary, list(replay(folder / "journal.sqlite").steps)


def data_loss(command: CommandLine, name: str) -> float:
    torch.set_num_threads(1)
    measure = runpy.run_path(str(RECIPES / "data_loss.py"))["data_loss"]
    found: float = measure(command.folder / "runs" / name, num_rows=16)
    return found


def test_the_demo_asks_nobody_else_who_listens_at_its_port() -> None:
    class Answers(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        given = [f"BIN={Path(sys.executable).parent}", f"WFM_PORT={other.server_port}"]
        make = ["make", "--assume-old=.venv/.installed", *given, "demo-wfm"]
        done = subprocess.run(make, cwd=RECIPES.parents[1], capture_output=True, text=True, check=False, timeout=150)
        other.shutdown()
    assert done.returncode != 0
    assert f"port: cannot listen at 127.0.0.1:{other.server_port}" in done.stderr
    assert "cosmos run" not in done.stdout


def test_videos_are_learnt(warmed_up: CommandLine) -> None:
    summary = json.loads((warmed_up.folder / "runs" / "wan-tiny-sft" / "summary.json").read_text())
    assert summary["heldout_loss_after"] < 0.2 * summary["heldout_loss_before"]
    # Its evaluations generate, beside training.
    assert summary["heldout_reward_after"] > summary["heldout_reward_before"]
    assert "data:image/webp" in (warmed_up.folder / "runs" / "wan-tiny-sft" / "report.html").read_text()


@pytest.mark.usefixtures("service")
def test_rewards_of_a_service_are_learnt_from_a_window_of_steps_and_data_is_lost(warmed_up: CommandLine) -> None:
    summary, steps = run(warmed_up, "wan-tiny-grpo-fast", "run.steps=25")
    before, after = summary["heldout_reward_before"], summary["heldout_reward_after"]
    assert after > before + 0.3, f"{before:.3f} before, {after:.3f} after"
    # Samples of weights that are trained have log-probs to which the trainer's are equal; stale ones meet the clip.
    assert steps[0].metrics["mismatch_max_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert 0.0 < max(step.metrics["clip_fraction"] for step in steps) < 0.9
    report = (warmed_up.folder / "runs" / "wan-tiny-grpo-fast" / "report.html").read_text()
    assert "data:image/webp" in report

    held, steps = run(warmed_up, "wan-tiny-ddrl", "run.steps=25", "algorithm.options.data_weight=0.02")
    assert held["heldout_reward_after"] > held["heldout_reward_before"] + 0.05
    assert all(step.metrics["imitation_data_loss"] > 0.0 for step in steps)
    assert data_loss(warmed_up, "wan-tiny-ddrl") < 0.8 * data_loss(warmed_up, "wan-tiny-grpo-fast")


@pytest.mark.usefixtures("service")
def test_rewards_are_learnt_by_flow_matching_of_samples_of_the_average(warmed_up: CommandLine) -> None:
    summary, _ = run(warmed_up, "wan-tiny-nft", "run.steps=12", "model.options.regressions=1")
    before, after = summary["heldout_reward_before"], summary["heldout_reward_after"]
    assert after > before + 0.15, f"{before:.3f} before, {after:.3f} after"
    assert summary["measures"]["goodness"]["last"] == pytest.approx(0.5, abs=0.1)
