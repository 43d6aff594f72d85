import asyncio
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest

from cosmos_core.config.schema import RewardConfig
from cosmos_core.errors import ConfigError, CosmosError, DataError
from cosmos_core.plugins.reward_function import reward_of
from cosmos_core.protocols import RewardCapabilities, Score
from cosmos_core.run import fork
from cosmos_core.run.fork import in_fork
from cosmos_core.run.planning import first_row, tables
from cosmos_core.run.planning.first_row import look_at_first
from cosmos_core.types import Array, Payload, Prompt


class Model:
    def encode(self, prompt):
        ids = np.arange(len(prompt.text), dtype=np.int64)
        return Payload(kind="tokens", arrays={"prompt": Array(dtype="int64", shape=ids.shape, data=ids.tobytes())})

    def prompt_text(self, payload):
        return f"<user>{payload.arrays['prompt'].shape[0]}"


MENDED = "demonstration with the reference"


class Dataset:
    def __init__(self, row):
        self.made = row

    def row(self, split, index):
        if index == 0:
            raise DataError("a bad row")
        return self.made


class Right:
    def score(self, completion):
        return Score(value=float(completion.text == "7"))


class Awaited:
    async def score(self, completion):
        if completion.text != "7":
            raise ValueError("no\nnumber")
        return 0.5


class Same:
    def score(self, completion):
        return 0.5


class Broken:
    def score(self, completion):
        return 1 / 0


class Leaving:
    def score(self, completion):
        raise SystemExit(3)


class Hanging:
    def score(self, completion):
        time.sleep(1.0)


class Busy:
    def score(self, completion):
        return re.match("(a+)+$", "a" * 40 + "b")


class Threaded:
    async def score(self, completion):
        return 1.0 if completion.text == "7" else await asyncio.to_thread(time.sleep, 1.0)


class Loading(Broken):
    def load(self):
        """Its scores need weights."""


def look(*rewards, kinds=("tokens",), row=Prompt(text="3+4=", demonstration="7", reference=7)):  # noqa: B008
    capable = RewardCapabilities(payload_kinds=frozenset(kinds))
    configs = [(RewardConfig(plugin=type(each).__name__, timeout_s=0.4), capable, each) for each in rewards]
    return look_at_first(Model(), Dataset(row), configs, 10)


def test_the_first_usable_row_is_rendered_and_scored():
    first = look(Right(), Awaited(), Loading())
    assert (first.shown, first.num_units) == ("<user>4", 4)
    assert first.completions == {"demonstration": "7", "wrong answer": "I do not know."}
    right, awaited = ([each.value for each in trial.outcomes.values()] for trial in first.trials)
    assert (right, awaited) == ([1.0, 0.0], [0.5, None])
    assert "ValueError: no number" in first.trials[1].outcomes["wrong answer"].detail
    assert look(Broken(), kinds=["media"]).trials == ()


def test_a_reward_that_scores_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"reward Broken: it scores neither '7' nor .* ZeroDivisionError"):
        look(Broken())
    with pytest.raises(ConfigError, match=r"reward Leaving: it scores neither .* SystemExit: 3"):
        look(Leaving())
    with pytest.raises(ConfigError, match=r"reward Hanging: it scores neither .* no score within 0.4 s"):
        look(Hanging())


def test_a_reward_that_is_waited_for_is_named(monkeypatch, capsys):
    monkeypatch.setattr(fork, "_SILENT_S", 0.05)
    monkeypatch.setattr(fork.fork_server, "place", lambda: None)  # another test may have begun one
    with pytest.raises(ConfigError, match=r"reward Hanging: it scores neither .* no score within 0.4 s"):
        in_fork(lambda: look(Right(), Hanging()))
    in_fork(lambda: look(Threaded()))
    several = (("Hanging", 1, " for each of 2 completions"), ("Threaded", 0, ""))
    told = [f"waiting for reward {name}, for at most 0.4 s{each} (reward.{n}.timeout_s)" for name, n, each in several]
    # On a busy machine the quick one is waited for, too.
    assert [line for line in capsys.readouterr().out.splitlines() if "reward Right" not in line] == told
    # Its thread outlives its time, and the event loop waits for it: what was scored before counts.
    (trial,) = look(Threaded()).trials
    assert capsys.readouterr().out.splitlines() == told[1:]  # said here where no process waits for this one
    assert [each.value for each in trial.outcomes.values()] == [1.0, None]
    assert trial.outcomes["wrong answer"].detail == "no score within 0.4 s (reward.0.timeout_s)"


def test_a_call_that_lets_no_other_thread_run_ends_the_planning_process(monkeypatch, capfd):
    monkeypatch.setattr(fork, "_SILENT_S", 0.05)
    monkeypatch.setattr(fork.fork_server, "place", lambda: None)
    monkeypatch.setattr(first_row, "_GRACE_S", 0.05)
    what = "reward Busy, for at most 0.4 s for each of 2 completions (reward.0.timeout_s)"
    with pytest.raises(CosmosError, match=rf"^planning ended .*; it waited for {re.escape(what)}, which may have let"):
        in_fork(lambda: look(Busy()))
    told = capfd.readouterr()
    assert re.search(r"test_first_row\.py\", line \d+ in score", told.err)
    assert told.out == f"waiting for {what}\n"


@pytest.mark.parametrize(
    ("demonstration", "reference", "shown"),
    [
        ("3+4=8\n#### 8", "7", {"demonstration": "3+4=8\n#### 8", "reference": "7", MENDED: "3+4=8\n#### 7"}),
        ("So it is \\boxed{-1,208.5}.", "7", {MENDED: "So it is \\boxed{7}."}),
        ("10-3", "7", {MENDED: "10-7"}),
        ("(1,-2)", "7", {MENDED: "(1,7)"}),
        ("#### 7", 7, {"demonstration": "#### 7", "reference": "7"}),
        ("no number", "7", {"demonstration": "no number", "reference": "7"}),
        (None, "7", {"reference": "7"}),
        ("#### 7", None, {"demonstration": "#### 7"}),
        (None, None, {"empty answer": ""}),
    ],
)
def test_a_careless_demonstrator_is_mended_by_the_reference(demonstration, reference, shown):
    made = Prompt(text="3+4=", demonstration=demonstration, reference=reference)
    first = look(Right(), row=made)
    assert {what: first.completions[what] for what in shown} == shown
    assert [*first.completions][-1] == "wrong answer"
    assert MENDED in first.completions or [*first.completions] == [*shown, "wrong answer"]


@pytest.mark.parametrize("long", ["1", "1.", "1-", "-1,"])
def test_long_numbers_take_no_time(long):
    made = Prompt(text="", demonstration=f"{long * 50_000} and -1.5", reference="7")
    began = time.monotonic()
    assert first_row._completions(made)[MENDED] == f"{long * 50_000} and 7"
    assert time.monotonic() - began < 2.0


def table_of(first):
    plan = SimpleNamespace(parts=SimpleNamespace(first_row=first), job=SimpleNamespace(unit="token"))
    (table,) = tables._first_row(plan)
    return dict(zip(*([str(cell) for cell in column.cells] for column in table.columns), strict=True))


def test_the_plan_shows_what_was_scored_and_remarks_on_a_reward_that_cannot_teach():
    bare = Prompt(text="3+4=")
    shown = table_of(look(Right(), Same(), row=Prompt(text="3+4=", demonstration="So 8", reference="7")))
    assert shown == {
        "prompt, 4 tokens": "<user>4",
        "demonstration": "So 8",
        "reference": "7",
        MENDED: "So 7",
        "wrong answer": "I do not know.",
        "reward Right": f"demonstration 0, reference 1, {MENDED} 0, wrong answer 0",
        "reward Same": f"demonstration 0.5, reference 0.5, {MENDED} 0.5, wrong answer 0.5; gives all the same: it "
        "cannot teach from this row",
    }
    both = table_of(look(Same()))["reward Same"]
    assert both == "demonstration 0.5, wrong answer 0.5; gives both the same: it cannot teach from this row"
    # Of a row that says nothing of what is right, nobody knows.
    assert table_of(look(Same(), row=bare))["reward Same"] == "empty answer 0.5, wrong answer 0.5"
    assert table_of(look()) == {"prompt, 4 tokens": "<user>4", "demonstration": "7"}


def test_a_function_of_lists_gets_all_completions_at_once():
    seen = []

    def lengths(prompts, completions):
        seen.append(list(completions))
        return [float(len(each)) for each in completions]

    def constant(completions):
        return [1.0]

    (trial,) = look(reward_of(lengths, {}, "lengths")).trials
    assert [each.value for each in trial.outcomes.values()] == [1.0, 14.0]
    assert seen == [["7", "I do not know."]]
    with pytest.raises(ConfigError, match=r"the function returned \[1\.0\] for 2 completions; it returns a list"):
        look(reward_of(constant, {}, "constant"))


def test_without_a_usable_row_there_is_nothing_to_show():
    assert look_at_first(Model(), Dataset(None), [], 1) is None
