import time

from cosmos_core.config.job import stages
from cosmos_core.control.__main__ import restore
from cosmos_core.control.journal import Journal
from cosmos_core.control.live.event_feed import EventFeed
from cosmos_core.control.live.figures import Timeline
from cosmos_core.control.live.snapshot import take
from cosmos_core.control.page.window import Window
from cosmos_core.observe.live import line
from cosmos_core.run.follower import Follower, progress_of, starting
from cosmos_core.run.screen import lines
from cosmos_core.run.status import Watcher


def progress(job, history, *, later_s=0.0):
    follower = Follower()
    follower.fold(history.entries)
    now = 1000.0 + len(history.entries) + later_s
    return follower, progress_of(follower, stages(job.recipe), {}, now=now)


def test_before_its_first_news_a_resumed_session_shows_where_it_starts_and_nothing_else(job):
    shown = starting(stages(job.recipe), 4, elapsed_s=1.0)
    assert (shown.phase, shown.step, shown.num_steps, shown.stage) == ("starting", 4, 9, "grpo")
    assert shown.eta_s is shown.policy_units_per_s is shown.reward is shown.heldout_loss is None
    assert starting(stages(job.recipe), 0, elapsed_s=1.0).stage == "sft"
    assert starting(stages(job.recipe), 9, elapsed_s=1.0).stage == "grpo"


def test_after_a_resume_there_is_no_rate_until_two_steps_of_the_session_are_done(job, history):
    history.join()
    history.work(until=6)
    history.resume(4)
    history.join(step=4)
    for until, is_known in ((4, False), (5, False), (6, True)):
        history.work(until=until)
        _, shown = progress(job, history)
        assert shown.step == until
        assert (shown.eta_s is not None, shown.policy_units_per_s is not None) == (is_known, is_known)


def test_the_live_rate_is_that_of_the_summary_and_goes_when_steps_stay_away(job, history):
    history.join()
    history.work()
    follower, shown = progress(job, history)
    main = [timed for timed in follower.steps if timed.record.step > 3]
    assert shown.policy_units_per_s == follower.timeline.units_per_s(main)["policy"]
    assert progress(job, history, later_s=1000.0)[1].policy_units_per_s is None


class Board:
    """Keeps the newest snapshot."""

    def offer(self, snapshot):
        self.snapshot = snapshot


FIGURES = (
    "phase", "step", "num_steps", "stage", "elapsed_s", "eta_s", "reward", "accuracy", "policy_units_per_s",
    "rollout_units_per_s",
)  # fmt: skip


def figures(shown):
    return {name: getattr(shown, name) for name in FIGURES}


def test_the_terminal_status_watch_and_page_show_the_same_figures(job, history, monkeypatch):
    gauges = {"rollout-0": {"units_per_s": 12.5}, "controller": {}}
    history.join()
    history.work(until=5)
    board = Board()
    window = Window(board, stages(job.recipe), "demo")
    # The page's controller was started in the middle: it knows what was before from the journal.
    before = Timeline()
    follower = Follower()
    for sequence, when, event in history.entries:
        follower.fold(((sequence, when, event),))
        before.take(when, event, follower.state)
    window.go_on_from(before)
    first = len(history.entries)
    history.work(until=7)
    for sequence, when, event in history.entries[first:]:
        follower.fold(((sequence, when, event),))
        monkeypatch.setattr(time, "time", lambda when=when: when)
        window.note(follower.state, event)
    now = history.entries[-1][1] + 3.0
    monkeypatch.setattr(time, "time", lambda: now)
    window.show(follower.state, lambda: gauges, 0.0)
    watcher = Watcher(job)
    watcher.fold(history.entries)
    watcher._gauges = gauges
    monkeypatch.setattr(watcher, "_address", lambda: "tcp://127.0.0.1:1")
    terminal = progress_of(follower, stages(job.recipe), gauges, now=now)
    assert terminal.eta_s > 0
    assert terminal.rollout_units_per_s == 12.5
    assert terminal.elapsed_s == now - history.entries[1][1]
    assert figures(watcher.snapshot()) == figures(board.snapshot) == figures(terminal)
    # `cosmos status` and `--watch` in words.
    for part in line(terminal).split(" | ")[:1]:
        assert lines(watcher.snapshot())[0].startswith(f"demo: {part}")


def test_a_run_that_nobody_runs_has_no_pace_and_its_time_stands_still(job, history):
    history.join()
    history.work(until=7)
    follower = Follower()
    follower.fold(history.entries)
    shown = progress_of(follower, stages(job.recipe), {}, now=None)
    assert (shown.eta_s, shown.policy_units_per_s) == (None, None)
    assert shown.elapsed_s == history.entries[-1][1] - history.entries[1][1]

    # A controller that is started again knows how long the run has gone on.
    history.join()
    history.work(until=7)
    job.directory.mkdir()
    with Journal(job.journal) as journal:
        for _, _, event in history.entries:
            journal.append(event)
        journal.commit()
        state, timeline = restore(journal, job, None)
    assert [timed.record for timed in timeline.steps] == state.steps
    assert len(timeline.sessions) == state.term == 2


def test_numbers_after_a_recovery_are_those_that_people_count(job, history):
    history.join()
    history.work(until=5)
    history.state.term += 1 << 20
    history.state.generation_number += 1 << 20
    shown = take(history.state, EventFeed(), Timeline(), stages(job.recipe), {}, name="demo", now=2000.0)
    assert (shown.term, shown.generation) == (1, 1)
