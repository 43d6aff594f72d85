"""The board, used from the page's loop as the page does, and from outside as the controller does."""

import asyncio

import pytest

from cosmos_core.control.page.board import Board
from cosmos_core.errors import TransportError
from cosmos_core.transport.messages import Stop


@pytest.fixture
def board(monkeypatch):
    monkeypatch.setattr("cosmos_core.control.page.board._ANSWER_S", 0.05)
    return Board()


def ask(board, meanwhile=lambda: None):
    """Ask for something, of which nobody takes notice; what the controller does meanwhile."""

    async def wait():
        board.open()
        request = asyncio.create_task(board.ask(Stop()))
        await asyncio.sleep(0)
        found = meanwhile()
        with pytest.raises(TransportError, match=r"not answered within 0\.05 s; it may still do what was asked"):
            await request
        return found

    return asyncio.run(wait())


def test_what_nobody_waits_for_any_more_is_not_carried_out(board):
    ask(board)
    assert board.take_asked() == []


def test_what_is_waited_for_is_taken_once(board):
    (asked,) = ask(board, board.take_asked)
    assert asked.ident
    assert board.take_asked() == []


def test_an_end_before_the_page_is_up_is_known_to_it(board):
    board.end()

    async def look():
        board.open()
        return board.has_ended

    assert asyncio.run(look())
