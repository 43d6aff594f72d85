import threading
import time
from types import SimpleNamespace

import attrs
import pluggy
import pytest

from cosmos_core.errors import ConfigError, PluginBrokenError
from cosmos_core.protocols import hookimpl
from cosmos_core.protocols import hooks as hookspecs
from cosmos_core.protocols.hooks import PROJECT
from cosmos_core.run import hooks as hookset
from cosmos_core.run.hooks import HookRunner, RunHooks, make_in_time


class Recorder:
    def __init__(self):
        self.seen = []

    @hookimpl
    def cosmos_step_finished(self, step, metrics):
        self.seen.append((step, metrics["loss"]))

    @hookimpl
    def cosmos_run_ended(self, outcome):
        self.seen.append(outcome)
        return f"shown of a {outcome} run"


class Raiser:
    def __init__(self):
        self.calls = 0

    @hookimpl
    def cosmos_step_finished(self, step):
        self.calls += 1
        raise ValueError(f"step {step} is unlucky")


class Hanger:
    def __init__(self):
        self.release = threading.Event()

    @hookimpl
    def cosmos_step_finished(self):
        self.release.wait(30)


def make_manager(**plugins):
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    for name, plugin in plugins.items():
        manager.register(plugin, f"hook:{name}")
    return manager


def notify_steps(runner, count):
    for step in range(count):
        runner.notify("cosmos_step_finished", run=None, step=step, metrics={"loss": step / 2})


def test_a_hook_that_raises_is_switched_off_and_reported_once_and_others_go_on():
    # Calls arrive in order and before close returns.
    recorder = Recorder()
    runner = HookRunner(make_manager(recorder=recorder), ["hook:recorder"], pytest.fail)
    notify_steps(runner, 3)
    runner.notify("cosmos_run_ended", run=None, outcome="finished", summary={})
    assert runner.close(5) == ["shown of a finished run"]
    assert recorder.seen == [(0, 0.0), (1, 0.5), (2, 1.0), "finished"]
    reports = []
    raiser, recorder = Raiser(), Recorder()
    runner = HookRunner(
        make_manager(raiser=raiser, recorder=recorder), ["hook:raiser", "hook:recorder"], reports.append
    )
    notify_steps(runner, 5)
    runner.close(5)
    assert raiser.calls == 1
    assert len(reports) == 1
    assert "'raiser' raised ValueError in cosmos_step_finished: step 0 is unlucky" in reports[0]
    assert len(recorder.seen) == 5

    # A hook that wants to end the process is switched off and reported.
    class Ender:
        @hookimpl
        def cosmos_step_finished(self, step):
            raise SystemExit(step)

    reports = []
    runner = HookRunner(make_manager(ender=Ender()), ["hook:ender"], reports.append)
    notify_steps(runner, 3)
    runner.close(5)
    assert reports == ["hook 'ender' raised SystemExit in cosmos_step_finished: 0; it is switched off, the run goes on"]


def test_a_hook_that_hangs_blocks_nothing_and_is_abandoned():
    reports = []
    hanger, recorder = Hanger(), Recorder()
    runner = HookRunner(
        make_manager(hanger=hanger, recorder=recorder), ["hook:hanger", "hook:recorder"], reports.append
    )
    notify_steps(runner, 3)
    began = time.monotonic()
    runner.close(0.2)
    assert time.monotonic() - began < 2
    assert len(reports) == 1
    assert "'hanger' did not finish in time (at least 3 calls left)" in reports[0]
    hanger.release.set()
    # A full queue abandons the hook without waiting.
    reports = []
    hanger = Hanger()
    runner = HookRunner(make_manager(hanger=hanger), ["hook:hanger"], reports.append, queue_size=2)
    notify_steps(runner, 10)
    assert len(reports) == 1
    assert "fell behind by 2 calls" in reports[0]
    runner.close(5)
    hanger.release.set()


def test_what_making_a_hook_raises_is_raised():
    # A hook is made.
    assert make_in_time("best", lambda: "made", 5) == "made"
    for error in (ConfigError("tracking.options.best: no"), TimeoutError("too slow")):

        def make(error=error):
            raise error

        with pytest.raises(type(error)) as raised:
            make_in_time("best", make, 5)
        assert raised.value is error

    # A hook that wants to end the process when it is made is refused.
    def make():
        raise SystemExit(3)

    with pytest.raises(PluginBrokenError, match="hook 'best' could not be made: SystemExit: 3"):
        make_in_time("best", make, 5)


def test_a_hook_that_blocks_when_it_is_made_is_refused_in_time(job, monkeypatch):
    release = threading.Event()
    began = time.monotonic()
    with pytest.raises(PluginBrokenError, match=r"hook 'slow' was not made within 0.1 s; do slow work in cosmos_run_"):
        make_in_time("slow", lambda: release.wait(30), 0.1)
    assert time.monotonic() - began < 2
    release.set()

    # A run does not start with a hook that blocks when it is made.
    release = threading.Event()
    monkeypatch.setattr(hookset, "_MAKE_S", 0.1)
    tracking = attrs.evolve(job.recipe.tracking, hooks=("slow",))
    plugins = SimpleNamespace(create=lambda *_: release.wait(30), attach=pytest.fail)
    with pytest.raises(PluginBrokenError, match="hook 'slow' was not made within"):
        RunHooks(
            attrs.evolve(job, recipe=attrs.evolve(job.recipe, tracking=tracking)),
            plugins,
            resumed_from=None,
            report=pytest.fail,
        )
    release.set()
