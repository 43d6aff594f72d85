from __future__ import annotations

import threading

import pytest

from cosmos_core.errors import EngineError, EngineLostError
from cosmos_core.rollout.serving.commands import Commands, LostProcessError


@pytest.fixture
def commands():
    made = Commands()
    opened = threading.Event()
    ended = []

    def serve():
        made.open()
        opened.set()
        try:
            while not ended:
                made.drain(wait=True)
        except RuntimeError as error:
            ended.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    opened.wait(5)
    yield made, ended, thread
    if thread.is_alive():
        made.post(lambda: ended.append(None))
    thread.join(5)


def fail(error):
    raise error


def test_a_refusal_fails_the_command_alone(commands):
    made, ended, _ = commands
    with pytest.raises(EngineError, match=r"^no such request$"):
        made.call(lambda: fail(EngineError("no such request")))
    assert made.call(lambda: 5) == 5
    assert not ended


@pytest.mark.parametrize("kind", [EngineLostError, EngineError])
def test_any_other_error_ends_the_thread_and_is_told_as_one_of_the_engine(commands, kind):
    made, ended, thread = commands
    lost = LostProcessError(kind("rank 1 of the engine did not answer"))
    with pytest.raises(EngineError, match=r"the engine's thread failed: LostProcessError: rank 1 .* answer") as caught:
        made.call(lambda: fail(lost))
    assert caught.value.__cause__ is lost
    assert type(caught.value) is kind
    thread.join(5)
    assert ended == [lost]
