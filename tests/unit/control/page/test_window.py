"""The controller's side of the page, at a server loop of its own."""

import functools
import time

import pytest

from cosmos_core.config.job import Stage
from cosmos_core.config.schema import ControlConfig, OptimizerConfig
from cosmos_core.control.machine import core
from cosmos_core.control.machine.events import Commanded, RunOpened
from cosmos_core.control.page.window import PAGE, Window
from cosmos_core.control.server_loop import ServerLoop
from cosmos_core.transport.messages import REQUEST, Answer, Drain, Stop

STAGE = Stage(
    index=0, key="algorithm", plugin="grpo", options={}, first_step=0, steps=3, prompts_per_step=2,
    optimizer=OptimizerConfig(),
)  # fmt: skip


class Board:
    """Keeps what it is given."""

    def __init__(self):
        self.offered, self.answers, self.asked = [], {}, []

    def offer(self, snapshot):
        self.offered.append(snapshot)

    def take_asked(self):
        found, self.asked = self.asked, []
        return found

    def answer(self, ident, refusal):
        self.answers[ident] = refusal


class Kept:
    """A journal in memory."""

    def __init__(self):
        self.events = []

    def append(self, event):
        self.events.append(event)
        return len(self.events)

    def commit(self):
        return 0


@pytest.fixture
def board():
    return Board()


@pytest.fixture
def window(board):
    return Window(board, (STAGE,), "demo")


@pytest.fixture
def state(settings):
    return core.begin(RunOpened(settings=settings()))


def ask(board, request, ident="a"):
    board.asked.append(Commanded(ident=ident, request=REQUEST.encode(request)))


def noted(journal, window, state):
    return ServerLoop(state, journal, ControlConfig(), 0.0, note=functools.partial(window.note, state))


def turn(server_loop, window, now=0.0):
    """What the server does in a turn."""
    for command in window.asked("run"):
        server_loop.take(PAGE, command, now)
    for identity, message in server_loop.commit(now):
        assert identity is PAGE
        window.answer(message)


def test_what_is_asked_at_the_page_is_journaled_carried_out_and_answered(board, window, state):
    journal = Kept()
    server_loop = noted(journal, window, state)
    ask(board, Stop())
    turn(server_loop, window)
    assert board.answers == {"a": ""}
    assert state.is_stopping
    assert journal.events == [Commanded(ident="a", request=REQUEST.encode(Stop()))]
    window.show(state, server_loop.gauges, 0.0)
    assert [(news.kind, news.text) for news in board.offered[-1].news] == [("asked", "stop")]


def test_what_the_run_cannot_do_is_refused_and_not_journaled(board, window, state):
    journal = Kept()
    server_loop = noted(journal, window, state)
    ask(board, Drain(name="nobody"))
    turn(server_loop, window)
    assert "nobody" in board.answers["a"]
    assert journal.events == []


def test_what_is_no_answer_goes_nowhere(board, window):
    window.answer(Answer(ident="a", refusal="no"))
    window.answer("something else")
    assert board.answers == {"a": "no"}


def test_a_snapshot_is_taken_twice_a_second_and_at_the_end(board, window, state):
    for now in (0.0, 0.1, 0.4, 0.6, 0.7):
        window.show(state, dict, now)
    assert len(board.offered) == 2
    window.show(state, dict, 0.8, is_last=True)
    assert len(board.offered) == 3


def test_where_snapshots_take_long_there_are_fewer(board, window, state):
    def slow():
        time.sleep(0.05)
        return {}

    for now in (0.0, 0.6, 0.9):
        window.show(state, slow, now)
    assert len(board.offered) == 1  # as each takes 0.05 s
    window.show(state, slow, 1000.0)
    assert len(board.offered) == 2


def test_nobody_at_a_socket_can_be_taken_for_the_page():
    assert len(PAGE) > 255
