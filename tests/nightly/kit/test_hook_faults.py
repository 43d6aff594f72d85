"""Faults in hooks that the kit must name."""

from __future__ import annotations

import textwrap

import attrs
import pytest

from cosmos_core.testing import HookConformance
from tests.nightly.kit.outcomes import only, unnamed

MODULE = """
import logging
import os
import subprocess
import threading
import time
from cosmos_core.protocols import Provider, hookimpl

class Best:
    def __init__(self, options, run):
        self.best = 0.0
        self.run = run

    @hookimpl
    def cosmos_evaluation_finished(self, step, metrics):
        self.best = max(self.best, metrics.get("heldout/accuracy", 0.0))

    @hookimpl
    def cosmos_run_ended(self, run, outcome):
        (run.directory / "best.txt").write_text(str(self.best))

{body}

@hookimpl
def cosmos_hook():
    return Provider(create={create})
"""


@attrs.frozen
class Fault:
    """What is wrong, the test that must catch it, and what that test must say."""

    test: str
    message: str
    body: str
    create: str = "Wrong"
    settings: str = ""


PLANTED = {
    "misspelt": Fault(
        "test_it_implements_lifecycle_hooks",
        "implements cosmos_step_finish, which is no hook; did you mean cosmos_step_finished?",
        """
        class Wrong(Best):
            @hookimpl
            def cosmos_step_finish(self, step): ...
        """,
    ),
    "unmarked": Fault(
        "test_it_implements_lifecycle_hooks",
        "cosmos_step_finished of Wrong lacks @hookimpl: it is never called",
        """
        class Wrong(Best):
            def cosmos_step_finished(self, step): ...
        """,
    ),
    "in-the-module": Fault(
        "test_it_implements_lifecycle_hooks",
        "cosmos_step_finished is implemented by the plugin's module, where a run never calls it",
        """
        Wrong = Best

        @hookimpl
        def cosmos_step_finished(step): ...
        """,
    ),
    "silent": Fault(
        "test_it_implements_lifecycle_hooks",
        "Wrong implements no lifecycle hook",
        """
        class Wrong:
            def __init__(self, options, run): ...
        """,
    ),
    "raises-on-nan": Fault(
        "test_rare_runs_are_followed",
        "raised ValueError in cosmos_step_finished: cannot convert float NaN to integer",
        """
        class Wrong(Best):
            @hookimpl
            def cosmos_step_finished(self, metrics):
                self.percent = int(metrics.get("train/loss", 0.0) * 100)
        """,
    ),
    "wants-an-evaluation": Fault(
        "test_rare_runs_are_followed",
        "raised ZeroDivisionError in cosmos_run_ended",
        """
        class Wrong(Best):
            @hookimpl
            def cosmos_run_ended(self, run):
                1 / self.best
        """,
    ),
    "cannot-resume": Fault(
        "test_rare_runs_are_followed",
        "in its resumption: hook 'cannot-resume' raised FileExistsError in cosmos_run_started",
        """
        class Wrong(Best):
            @hookimpl
            def cosmos_run_started(self, run):
                (run.directory / "metrics").mkdir()
        """,
    ),
    "blocks": Fault(
        "test_an_ordinary_run_is_followed_and_left_as_it_is",
        "cosmos_weights_published has not returned after 2 s",
        """
        class Wrong(Best):
            @hookimpl
            def cosmos_weights_published(self, version):
                threading.Event().wait()
        """,
        settings="timeout_s = 2.0",
    ),
    "ends-its-thread": Fault(
        "test_an_ordinary_run_is_followed_and_left_as_it_is",
        "hook 'ends-its-thread' raised SystemExit in cosmos_step_finished: 1",
        """
        class Wrong(Best):
            @hookimpl
            def cosmos_step_finished(self):
                raise SystemExit(1)
        """,
    ),
    "blocks-when-made": Fault(
        "test_an_ordinary_run_is_followed_and_left_as_it_is",
        "hook 'blocks-when-made' was not made within 2 s; do slow work in cosmos_run_started",
        """
        class Wrong(Best):
            def __init__(self, options, run):
                threading.Event().wait()
        """,
        settings="timeout_s = 2.0",
    ),
    "blocks-when-made-again": Fault(
        "test_it_is_found_and_made_of_options_that_teach",
        "hook 'blocks-when-made-again' was not made within 2 s",
        """
        class Wrong(Best):
            lock = threading.Lock()

            def __init__(self, options, run):
                self.lock.acquire()
        """,
        settings="timeout_s = 2.0",
    ),
    "ends-the-process-when-made": Fault(
        "test_an_ordinary_run_is_followed_and_left_as_it_is",
        "hook 'ends-the-process-when-made' could not be made: SystemExit: no account",
        """
        class Wrong(Best):
            def __init__(self, options, run):
                raise SystemExit("no account")
        """,
    ),
    "changes-directory": Fault(
        "test_an_ordinary_run_is_followed_and_left_as_it_is",
        "the hook changed the working directory to /; use absolute paths",
        """
        class Wrong(Best):
            @hookimpl
            def cosmos_run_started(self):
                os.chdir("/")
        """,
    ),
    "changes-environment": Fault(
        "test_an_ordinary_run_is_followed_and_left_as_it_is",
        "the hook changed the environment variables HTTP_PROXY, which the run's processes inherit",
        """
        class Wrong(Best):
            @hookimpl
            def cosmos_run_started(self):
                os.environ["HTTP_PROXY"] = "http://127.0.0.1:9"
                os.environ["TRACKER_ACTIVE"] = "1"
        """,
        settings="own_variables = ('TRACKER_',)",
    ),
    "silences-logging": Fault(
        "test_an_ordinary_run_is_followed_and_left_as_it_is",
        "the hook called logging.disable, which silences the run",
        """
        class Wrong(Best):
            @hookimpl
            def cosmos_run_ended(self):
                logging.disable(logging.CRITICAL)
        """,
    ),
    "logs-everything": Fault(
        "test_an_ordinary_run_is_followed_and_left_as_it_is",
        "the hook set the level of the root logger to DEBUG; set the level of its own logger",
        """
        class Wrong(Best):
            @hookimpl
            def cosmos_run_started(self):
                logging.getLogger().setLevel(logging.DEBUG)
        """,
    ),
    "changes-arguments": Fault(
        "test_an_ordinary_run_is_followed_and_left_as_it_is",
        "cosmos_step_finished changed its argument metrics; work on a copy",
        """
        class Wrong(Best):
            @hookimpl
            def cosmos_step_finished(self, step, metrics):
                metrics["step"] = step
        """,
    ),
    "remembers-in-the-class": Fault(
        "test_two_runs_in_one_process_do_not_mix",
        "best.txt of the run 'first-4711' tells of the run 'second-0815'",
        """
        class Wrong(Best):
            seen = []

            @hookimpl
            def cosmos_evaluation_finished(self, metrics):
                self.seen.append(metrics.get("heldout/accuracy", 0.0))
                self.best = max(self.seen)
        """,
    ),
    "serves-one-run-at-a-time": Fault(
        "test_two_runs_in_one_process_do_not_mix",
        "left {'first-4711': 1, 'second-0815': 0} files in their folders; use RunInfo.directory only",
        """
        class Wrong(Best):
            open = []

            @hookimpl
            def cosmos_run_started(self):
                self.is_first = not self.open
                self.open.append(self)

            @hookimpl
            def cosmos_run_ended(self, run, outcome):
                if self.is_first:
                    super().cosmos_run_ended(run, outcome)
                self.open.remove(self)
        """,
    ),
    "leaves-a-thread": Fault(
        "test_nothing_is_left_when_the_run_is_over",
        "(threads that it waits for: poller); make threads daemons",
        """
        class Wrong(Best):
            @hookimpl
            def cosmos_run_started(self):
                threading.Thread(target=threading.Event().wait, name="poller", daemon=False).start()
        """,
        settings="timeout_s = 2.0",
    ),
    "leaves-a-process": Fault(
        "test_nothing_is_left_when_the_run_is_over",
        "processes were left behind: sleep 600",
        """
        class Wrong(Best):
            @hookimpl
            def cosmos_run_started(self):
                subprocess.Popen(["sleep", "600"])
        """,
    ),
}


@pytest.fixture(scope="module")
def outcomes(run_kit):
    modules = {"good": MODULE.format(body="", create="Best")}
    bodies = {}
    for name, fault in PLANTED.items():
        modules[name] = MODULE.format(body=textwrap.dedent(fault.body), create=fault.create)
        bodies[name] = f"{only(HookConformance, [fault.test])}{fault.settings}\n"
    return run_kit("hook", modules, bodies=bodies)


@pytest.mark.slow
def test_each_fault_is_named_and_none_where_there_is_none(outcomes):
    assert {each.result for each in outcomes["good"]} == {"passed"}
    assert unnamed(outcomes, {name: (fault, fault.test, fault.message) for name, fault in PLANTED.items()}) == {}
