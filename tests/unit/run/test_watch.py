"""Watching a run in the terminal: a whole run's journal, from a controller that tells it or from its file."""

import io
import json
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from cosmos_core.config.loading import save_job
from cosmos_core.control.journal import Journal
from cosmos_core.errors import ConfigError, DamagedJournalError
from cosmos_core.run import status as watching
from cosmos_core.run.address import address_file
from cosmos_core.run.folder import held
from cosmos_core.run.screen import facts, lines, screen, sparkline
from cosmos_core.run.status import Watcher, tell, watch
from cosmos_core.transport.sockets import Closing


@pytest.fixture
def told(job, finished):
    """A finished run, as a snapshot."""
    watcher = Watcher(job)
    watcher.fold(finished.entries)
    return watcher.snapshot()


@pytest.fixture
def stored(job, finished):
    """The folder of a finished run."""
    job.directory.mkdir()
    save_job(job)
    with Journal(job.journal) as journal:
        for _, _, event in finished.entries:
            journal.append(event)
        journal.commit()
    return job.directory


def plain():
    return Console(file=io.StringIO(), width=200)


def terminal(**options):
    return Console(file=io.StringIO(), force_terminal=True, color_system=None, width=120, **options)


def test_a_finished_run_is_a_snapshot_with_its_own_times(told, finished, job):
    # A finished run.
    assert told.name == "demo"
    assert told.outcome == "finished"
    assert told.step == told.num_steps == 9
    assert told.accuracy == finished.state.evaluations[-1].accuracy
    assert {"joined", "checkpoint", "evaluated", "ended"} <= {news.kind for news in told.news}

    # What happened carries its own time.
    times = [news.time for news in told.news]
    assert times == sorted(times)
    assert 1000.0 < times[0] < times[-2] < 1e6

    # A journal that is read again happened once.
    watcher = Watcher(job)
    for _ in range(2):
        watcher.fold(finished.entries)
    assert [news.text for news in watcher.snapshot().news] == [news.text for news in told.news]

    # Nothing is known before the run was opened.
    assert Watcher(job).snapshot() is None


def test_a_screen_and_lines_have_everything(told):
    # A screen has everything.
    console = terminal(height=60)
    console.print(screen(told, height=60))
    shown = console.file.getvalue()
    for words in ("demo", "finished", "step 9/9", "policy-0", "rollout-0", "reward", "loss", "staleness", "checkpoint"):
        assert words in shown
    assert any(bar in shown for bar in "▁▂▃▄▅▆▇█")

    # Lines say the same.
    head, *pools = lines(told)
    figures = "step 9/9 | stage grpo | reward 0.634 | held-out 0.400 @9 (1 of 5 unscored) | "
    assert head.startswith(f"demo: 1:04 finished | {figures}")
    assert " | weights 9 | generation 1 (1 member) | " in head
    assert [words.split(":")[0].strip() for words in pools] == ["policy", "rollout"]
    assert dict(facts(told))["staleness"]

    # A small screen says what it leaves out.
    import attrs

    many = attrs.evolve(told, replicas=told.replicas * 20)
    console = terminal(height=24)
    console.print(screen(many, height=24))
    assert "policy: 1" in console.file.getvalue()
    assert len(console.file.getvalue().splitlines()) < 40

    # Markup of what a run says is not interpreted.
    import attrs

    from cosmos_core.control.live.event_feed import News

    odd = attrs.evolve(told, reason="[red]no[/red] [/", news=(News(time=1.0, kind="problem", text="[bold]x[/] [/"),))
    console = terminal()
    console.print(screen(odd))
    assert "[red]no[/red] [/" in console.file.getvalue()
    assert "[bold]x[/] [/" in console.file.getvalue()

    # A sparkline goes from the lowest to the highest.
    from cosmos_core.control.live.event_feed import Curve

    rising = Curve(name="x", points=tuple((step, float(step)) for step in range(100)))
    assert sparkline(rising, width=8) == "▁▂▃▄▅▆▇█"
    assert sparkline(Curve(name="x", points=((1, 2.0), (2, 2.0)))) == "▁▁"


def test_a_run_is_told_as_json(stored, job, told, monkeypatch):
    # Of a run that is over, watching ends at once, too.
    (line,) = tell(stored, watches=False)
    (watched,) = tell(stored, watches=True)
    known, again = json.loads(line), json.loads(watched)
    assert known | {"time": 0} == again | {"time": 0}
    assert (known["phase"], known["step"], known["num_steps"], known["accuracy"]) == ("finished", 9, 9, told.accuracy)
    assert {"stage", "reward", "staleness_mean", "policy_units_per_s", "eta_s", "replicas", "reason"} <= known.keys()
    assert not {"curves", "samples", "news", "heldout"} & known.keys()
    assert known["report"] is None
    (stored / "report.html").touch()
    monkeypatch.setattr(watching, "completed", lambda url: [6, 9])
    known = json.loads(next(tell(stored, watches=False)))
    assert known["report"] == str(stored / "report.html")
    assert known["checkpoints"].keys() <= {"6", "9"}
    assert known["best_checkpoint"] in (6, 9)

    # A figure that is no number is none; and so is all of a run that has not begun.
    import attrs

    watcher = Watcher(job)
    assert json.loads(watcher.as_json(attrs.evolve(told, loss=float("nan"))))["loss"] is None
    job.journal.unlink()
    assert json.loads(next(tell(stored, watches=False)))["phase"] == "not begun"


def test_a_run_that_is_over_is_told_at_once_from_its_journal(stored, job, monkeypatch):
    console = plain()
    assert watch(stored, console) == "finished"
    shown = console.file.getvalue()
    assert "finished | step 9/9" in shown
    assert "  joined: policy-0" in shown

    # On a terminal the last screen stays.
    console = terminal()
    assert watch(stored, console) == "finished"
    assert console.file.getvalue().rstrip().endswith("finished")

    # A controller on another machine that is not heard is given up.
    monkeypatch.setattr(watching, "_GONE_S", 0.3)
    monkeypatch.setattr(watching, "_POLL_S", 0.05)
    monkeypatch.setattr(watching, "person_key", lambda keys: None)
    address_file(job).write_text(json.dumps({"address": "tcp://127.0.0.1:9", "pid": 1, "host": "node-7/boot"}))
    console = plain()
    assert watch(stored, console) == "finished"
    assert "finished | step 9/9" in console.file.getvalue()


@pytest.fixture
def left(job, history):
    """The folder of a run whose controller went away in the middle."""
    history.join()
    job.directory.mkdir()
    save_job(job)
    with Journal(job.journal) as journal:
        for _, _, event in history.entries:
            journal.append(event)
        journal.commit()
    return job.directory


def test_a_run_that_was_left_is_told(left, monkeypatch, job):
    # A controller that does not come back ends the watching.
    monkeypatch.setattr(watching, "_GONE_S", 0.3)
    monkeypatch.setattr(watching, "_POLL_S", 0.05)
    console = plain()
    with held(left):
        assert watch(left, console) == ""
    phases = [words.split(" | ")[0] for words in console.file.getvalue().splitlines() if words.startswith("demo: 0:")]
    assert phases == ["demo: 0:00 waiting for the controller"]
    assert "interrupted: its controller is gone" in console.file.getvalue()
    # A run that no session has is told at once.
    monkeypatch.setattr(watching.time, "sleep", lambda _seconds: pytest.fail("nobody will start a controller"))
    console = plain()
    assert watch(left, console) == ""
    shown = console.file.getvalue()
    assert "interrupted | step 0/9" in shown
    assert shown.endswith("demo: interrupted: its controller is gone; cosmos run --resume goes on\n")
    assert "policy: 1" not in shown
    (left / "summary.json").write_text(json.dumps({"outcome": "stopped", "steps": 3, "wall_s": 1.0}))
    console = plain()
    assert watch(left, console) == "stopped"
    assert "stopped | step 0/9" in console.file.getvalue()
    # A lost journal is told.
    job.journal.unlink()
    job.recovery_snapshots.mkdir()
    (job.recovery_snapshots / "step-4").write_bytes(b"")
    with pytest.raises(DamagedJournalError, match="cosmos recover"):
        watch(left, plain())


def test_a_history_that_comes_in_parts_is_not_shown_as_the_present(job, finished, monkeypatch):
    parts = [finished.entries[:20], finished.entries[20:40], finished.entries[40:]]
    now = [0.0]

    class Told(Closing):
        """An observer of a controller that tells a part each time it is looked at."""

        newest, last_sequence, silence_s, gauges = -1, 0, 0.0, {}

        def __init__(self, *_arguments):
            pass

        def poll(self, left):
            now[0] += left
            found = parts.pop(0)
            self.newest, self.last_sequence = len(finished.entries), found[-1][0]
            return found

        def close(self):
            pass

    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    monkeypatch.setattr(watching, "Observer", Told)
    monkeypatch.setattr(watching, "person_key", lambda keys: None)
    monkeypatch.setattr(watching, "read_address", lambda job: "tcp://127.0.0.1:9")
    job.directory.mkdir()
    *before, shown = Watcher(job).follow()
    assert before == [None, None]
    assert (shown.step, shown.outcome) == (9, "finished")


def test_what_never_began_is_told(tmp_path, job, monkeypatch):
    # What is no run is told.
    with pytest.raises(ConfigError):
        watch(tmp_path, plain())

    # A run that never begins is told.
    monkeypatch.setattr(watching, "_GONE_S", 0.1)
    job.directory.mkdir()
    save_job(job)
    console = plain()
    assert watch(job.directory, console) == ""
    assert "not begun yet" in console.file.getvalue()
