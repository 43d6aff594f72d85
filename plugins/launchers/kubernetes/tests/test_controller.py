import itertools
import os
import signal
from pathlib import Path

import pytest

from cosmos_core.errors import ConfigError, ReplicaError
from cosmos_launcher_kubernetes import controller
from cosmos_launcher_kubernetes.manifest import FAILED, REFUSED

RECIPE = Path(__file__).parents[4] / "recipes" / "arithmetic.toml"


@pytest.fixture
def supervise(tmp_path, monkeypatch):
    """Run a controller's pod whose run ends so; its exit code."""
    monkeypatch.chdir(tmp_path)

    def run(ending, *, is_there=False):
        def started(*_arguments, **_options):
            earlier = signal.signal(signal.SIGTERM, lambda *_: None)
            interrupt = signal.signal(signal.SIGINT, lambda *_: None)
            try:
                return ending()
            finally:
                signal.signal(signal.SIGTERM, earlier)
                signal.signal(signal.SIGINT, interrupt)

        def unexpected(*_arguments, **_options):
            pytest.fail("the other way was taken")

        monkeypatch.setattr(controller, "run_recipe", unexpected if is_there else started)
        monkeypatch.setattr(controller, "resume_run", started if is_there else unexpected)
        if is_there:
            (tmp_path / "runs" / "arithmetic").mkdir(parents=True, exist_ok=True)
            (tmp_path / "runs" / "arithmetic" / "job.json").touch()
        return controller.main([str(RECIPE)])

    return run


def raising(error):
    def end():
        raise error

    return end


def stopped_by(number):
    def end():
        os.kill(os.getpid(), number)
        return "stopped"

    return end


def test_the_exit_code_says_what_becomes_of_the_jobset(supervise, subtests):
    for is_there, (ending, code) in itertools.product(
        [False, True],
        [
            (lambda: "finished", 0),
            (lambda: "failed", FAILED),
            (lambda: "stopped", 0),
            (stopped_by(signal.SIGINT), 0),
            (stopped_by(signal.SIGTERM), 143),
            (raising(KeyboardInterrupt()), 0),
        ],
    ):
        with subtests.test(is_there=is_there, ending=ending, code=code):
            assert supervise(ending, is_there=is_there) == code
            assert signal.set_wakeup_fd(-1) == -1


def test_a_recipe_that_cannot_run_fails_the_jobset(supervise, capsys):
    assert supervise(raising(ConfigError("algorithm.x: unknown"))) == REFUSED
    assert "cosmos: algorithm.x: unknown" in capsys.readouterr().out


def test_a_run_that_cannot_go_on_yet_is_tried_again(supervise):
    code = supervise(raising(ReplicaError("another session has it")), is_there=True)
    assert code not in {0, FAILED, REFUSED}
