from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cosmos_core.config.job import Job, StageFacts
from cosmos_core.config.loading import save_job
from cosmos_core.config.schema import AlgorithmConfig, DatasetConfig, ModelConfig, Recipe, RunConfig
from cosmos_core.replica.process import run_role
from cosmos_core.transport import key_folder
from cosmos_core.transport.messages import Acknowledged, Hello, Refused, Reports, Welcome
from cosmos_core.transport.reports import REPORT, Failed


@pytest.fixture
def run_dir(tmp_path) -> Path:
    recipe = Recipe(
        run=RunConfig(name="test", steps=1),
        model=ModelConfig(path="nowhere"),
        algorithm=AlgorithmConfig(plugin="none"),
        dataset=DatasetConfig(plugin="none"),
    )
    job = Job(
        run_id="run",
        directory=tmp_path,
        recipe_directory=tmp_path,
        recipe=recipe,
        num_train_rows=1,
        num_heldout_rows=1,
        num_evaluation_prompts=0,
        uses_rollouts=True,
        stages=(StageFacts(source="rollouts"),),
    )
    save_job(job)
    return tmp_path


@pytest.fixture
def peer(run_dir, make_peer):
    """A controller that asks for the run's keys."""
    key_folder.ensure(run_dir / "keys")
    return make_peer(run_dir / "keys")


@pytest.fixture
def start(run_dir, peer):
    """Start a role whose main function has the given body."""
    started = []

    def start(body: str, *more: str, **env: str) -> subprocess.Popen[str]:
        code = "\n".join(
            [
                "import time, threading",
                "from cosmos_core.errors import *",
                "from cosmos_core.transport.messages import *",
                "from cosmos_core.replica.process import run_role",
                "def main(args):",
                textwrap.indent(textwrap.dedent(body), "    "),
                "run_role('rollout', main)",
            ]
        )
        line = ["--run", str(run_dir), "--name", "rollout-0", "--controller", peer.address, *more]
        process = subprocess.Popen(
            [sys.executable, "-c", code, *line], stderr=subprocess.PIPE, text=True, env={**os.environ, **env}
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def log_of(run_dir: Path, name: str = "rollout-0") -> list[dict[str, str]]:
    return [json.loads(line) for line in (run_dir / "logs" / f"{name}.jsonl").read_text().splitlines()]


def test_a_role_that_returns_ends_with_0(start, run_dir):
    """It is a process of several, and knows its replica; it imports no torch."""
    process = start(
        """
        import sys, cosmos_core.transport.payloads
        assert 'torch' not in sys.modules
        assert args.checkpoint == 'here' and args.job.run_id == 'run'
        assert (args.name, args.replica, args.rank, args.session) == ('policy-1.2', 'policy-1', 2, 's')
        """,
        *["--checkpoint", "here", "--name", "policy-1.2", "--rank", "2", "--session", "s"],
    )
    assert process.communicate(timeout=20) == (None, "")
    assert process.returncode == 0
    assert [entry["message"].partition(",")[0] for entry in log_of(run_dir, "policy-1.2")] == [
        "rollout policy-1.2 started",
        "rollout policy-1.2 is done",
    ]


def test_an_error_is_reported_logged_and_ends_with_1(start, peer, run_dir):
    process = start("""
        client = args.connect(endpoints={'payloads': 'tcp://a:1/t'})
        raise EngineError('the engine is on fire; use another one')
    """)
    hello = peer.expect(Hello, 20)
    assert (hello.name, hello.role, hello.pid, hello.endpoints) == (
        "rollout-0",
        "rollout",
        process.pid,
        {"payloads": "tcp://a:1/t"},
    )
    peer.send(Welcome(term=1, acknowledged=0))
    (data,) = peer.expect(Reports).reports
    assert REPORT.decode(data) == Failed(reason="the engine is on fire; use another one")
    peer.send(Acknowledged(term=1, acknowledged=1))
    _, printed = process.communicate(timeout=10)
    assert printed == "rollout-0: ERROR: the engine is on fire; use another one\n"
    assert process.returncode == 1
    assert "exception" not in log_of(run_dir)[-1]


def test_an_unexpected_error_keeps_its_traceback_in_the_log_and_one_that_was_wrapped_is_told(start, run_dir):
    process = start("""
        try:
            {}['missing']
        except KeyError as error:
            raise RuntimeError('[Stage 1] failed to run forward: args ...') from error
    """)
    _, printed = process.communicate(timeout=20)
    assert process.returncode == 1
    assert printed == "rollout-0: ERROR: KeyError: 'missing'\n"
    assert "Traceback" in log_of(run_dir)[-1]["exception"]
    assert "failed to run forward" in log_of(run_dir)[-1]["exception"]


def test_a_controller_that_is_gone_does_not_keep_a_failing_replica(start, run_dir):
    """Its traceback is in the log only as it is debugged."""
    process = start(
        """
        import cosmos_core.replica.process as p
        p._FLUSH_S = 0.2
        args.connect(endpoints={})
        raise EngineError('x')
        """,
        COSMOS_DEBUG="1",
    )
    process.communicate(timeout=20)
    assert process.returncode == 1
    *_, failure, unconfirmed = log_of(run_dir)
    assert "EngineError: x" in failure["exception"]
    assert "did not confirm the failure within 0.2 s" in unconfirmed["message"]


def test_one_that_is_refused_for_good_ends_with_77(start, peer):
    process = start("""
        client = args.connect(endpoints={})
        while True: client.wait_directive(0, 1)
    """)
    peer.expect(Hello, 20)
    peer.send(Refused(reason="it belongs to run other", is_final=True))
    _, printed = process.communicate(timeout=10)
    assert process.returncode == 77
    assert "the controller refused this replica: it belongs to run other" in printed


def test_sigterm_stops_a_role(start, peer):
    process = start("""
        client = args.connect(endpoints={})
        args.stop.wait(60)
    """)
    peer.expect(Hello, 20)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=5)
    assert process.returncode == 0


def test_the_command_line_is_checked(capsys):
    with pytest.raises(SystemExit, match="2"):
        run_role("rollout", lambda args: None, ["--run", "x", "--name", "n", "--controller", "c", "--nmae", "x"])
    assert "unrecognized arguments: --nmae x" in capsys.readouterr().err


def test_a_run_folder_without_a_job_is_an_error_without_traceback(start, run_dir):
    (run_dir / "job.json").unlink()
    process = start("pass")
    _, printed = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "job.json" in printed
    assert "Traceback" not in printed


def test_a_failing_thread_is_logged_and_one_left_behind_does_not_keep_the_process(start, run_dir):
    process = start("""
        import cosmos_core.replica.process as p
        p._EXIT_S = 0.2
        thread = threading.Thread(target=lambda: 1 / 0, name='helper')
        thread.start(); thread.join()
        threading.Thread(target=time.sleep, args=[60]).start()
    """)
    process.communicate(timeout=20)
    assert process.returncode == 0
    assert any(entry["message"] == "helper failed: division by zero" for entry in log_of(run_dir))


def test_a_failing_process_of_several_waits_for_nothing_that_is_left(start):
    """The interpreter would wait for the thread, as it does for one that is inside a collective."""
    process = start(
        """
        threading.Thread(target=time.sleep, args=(60,)).start()
        raise EngineError('x')
        """,
        *["--session", "s"],
    )
    _, printed = process.communicate(timeout=8)
    assert (process.returncode, printed) == (1, "rollout-0: ERROR: x\n")


def test_the_end_of_another_process_ends_this_one_and_is_reported(start, peer):
    process = start("""
        args.connect(endpoints={})
        threading.Thread(target=args.end, args=("policy-0 rank 3: boom",)).start()
        import ctypes; ctypes.CDLL(None).pause()
    """)
    peer.expect(Hello, 20)
    peer.send(Welcome(term=1, acknowledged=0))
    (data,) = peer.expect(Reports).reports
    assert REPORT.decode(data) == Failed(reason="policy-0 rank 3: boom")
    peer.send(Acknowledged(term=1, acknowledged=1))
    _, printed = process.communicate(timeout=5)
    assert (process.returncode, printed) == (1, "rollout-0: ERROR: policy-0 rank 3: boom\n")


def test_one_that_is_refused_and_stuck_ends_all_the_same(start, peer, run_dir):
    process = start("""
        import ctypes
        import cosmos_core.replica.process as p
        p._STUCK_S = 0.3
        args.connect(endpoints={'payloads': 'tcp://a:1/t'})
        while True:
            ctypes.CDLL(None).pause()
    """)
    peer.expect(Hello, 20)
    peer.send(Refused(reason="it was given up (rollout-0: hung)"))
    _, printed = process.communicate(timeout=20)
    assert process.returncode == 75
    assert "stuck after the controller refused this replica (it was given up (rollout-0: hung))" in printed
