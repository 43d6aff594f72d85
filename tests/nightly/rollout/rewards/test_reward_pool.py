"""Reward workers that hang, and that lose their parent."""

from __future__ import annotations

import subprocess
import sys

import psutil

from cosmos_core.types import SampleStatus

LATE, OK = SampleStatus.REWARD_TIMEOUT, SampleStatus.OK


def test_every_hang_among_many_is_found(scorer):
    texts = ["hang" if n % 7 == 3 else f"number {n}" for n in range(21)]
    found = scorer(num_workers=2, timeout_s=1.0).score(*texts)
    assert [outcome.status for outcome in found] == [LATE if text == "hang" else OK for text in texts]


def test_workers_die_with_their_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import time\n"
        "from cosmos_core.config.schema import RewardConfig\n"
        "from cosmos_core.protocols import Completion\n"
        "from cosmos_core.rollout.rewards.pool import RewardPool\n"
        "from cosmos_core.types import Prompt\n"
        "pool = RewardPool([RewardConfig(plugin='obedient', timeout_s=100)], num_workers=1, seed=0)\n"
        "pool.start()\n"
        "pids = []\n"
        "pool.submit([Completion(prompt=Prompt(text=''), text='pid')], pids.extend)\n"
        "while not pids: time.sleep(0.01)\n"
        "pool.submit([Completion(prompt=Prompt(text=''), text='hang')], print)\n"
        "time.sleep(0.2)\n"
        "print(int(pids[0][0].value), flush=True)\n"
        "time.sleep(100)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        worker = psutil.Process(int(parent.stdout.readline()))
        assert worker.is_running()
        parent.kill()
        parent.wait()
    worker.wait(5)


def test_workers_import_nothing_from_the_current_folder(scorer, tmp_path, monkeypatch):
    (tmp_path / "obedient_plugin.py").write_text("raise SystemExit('imported from the current folder')\n")
    monkeypatch.chdir(tmp_path)
    assert scorer().value("number 3") == 3.0


def test_a_coroutine_that_blocks_its_worker_is_a_timeout_of_its_completion_alone(scorer):
    found = scorer(timeout_s=1.5).score("number 1", "async 0.1", "async-block", "number 2", "async 0.05", "number 3")
    assert [outcome.status for outcome in found] == [OK, OK, LATE, OK, OK, OK]
    assert "1.5 s" in found[2].detail
