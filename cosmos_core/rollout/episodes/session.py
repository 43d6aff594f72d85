"""Sessions of agents as they go on: their calls, and what these go on from."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, InvalidStateError
from typing import Any

import attrs

from cosmos_core.rollout.endpoint.calls import Call, CallError, Choice, Reply
from cosmos_core.rollout.episodes.groups import Sample
from cosmos_core.rollout.episodes.recording import Recording, Turn
from cosmos_core.types import Message, Payload


@attrs.define(kw_only=True, eq=False)
class Session(Sample):
    """One sample on its way.

    Attributes:
        name: Its secret name.
        recording: The model's turns.
        replies: The last turn of each reply and what had been said after it, by the reply's id.
        waiting: Calls that are being answered, by the ids of their requests.
        num_calls: Calls so far.
        num_requests: Requests to the engine so far.
        malformed: What was wrong with the model's calls of tools.
        limit: The bound that it met, in words; empty while it met none.
        final: Its own reward, besides those of replies (`recording.rewards`); None while nobody has told it.
    """

    name: str
    recording: Recording = attrs.field(factory=Recording)
    replies: dict[str, tuple[Turn, tuple[Message, ...]]] = attrs.field(factory=dict)
    waiting: dict[str, Future[Reply]] = attrs.field(factory=dict)
    num_calls: int = 0
    num_requests: int = 0
    malformed: list[str] = attrs.field(factory=list)
    limit: str = ""
    final: float | None = None

    @property
    def reward(self) -> float | None:
        """All rewards that were told; None: none was."""
        told = [*self.recording.rewards.values(), *([] if self.final is None else [self.final])]
        return sum(told) if told else None


@attrs.define(kw_only=True, eq=False)
class Asked:
    """A call that is being answered.

    Attributes:
        session: Whose.
        call: What is asked.
        messages: The whole history.
        before: The turn that it goes on from.
        given: The ids between that turn and the reply, with what they show, as a prompt.
        prompt: All before the reply, likewise.
        future: Gets the reply.
        most: Units that each reply may have.
        choices: Those that are there, by their place.
    """

    session: Session
    call: Call
    messages: tuple[Message, ...]
    before: Turn | None
    given: Payload
    prompt: Payload
    future: Future[Reply]
    most: int = 0
    choices: dict[int, tuple[Choice, list[Turn]]] = attrs.field(factory=dict)

    @property
    def num_prompt(self) -> int:
        """Units before the reply."""
        return self.prompt.arrays["prompt"].shape[0]


def refuse(future: Future[Any], error: CallError) -> None:
    """Refuse a call that has no answer yet."""
    with contextlib.suppress(InvalidStateError):  # it was answered, or its client has left
        future.set_exception(error)


def words_before(turn: Turn) -> list[int]:
    """Ids of a whole reply, of which a turn is the last part."""
    parts = [turn]
    while (before := parts[0].before) is not None and not before.ends:
        parts.insert(0, before)
    return [int(each) for part in parts for each in part.made]


def num_known(before: Turn | None) -> int:
    """Messages up to a turn."""
    return 0 if before is None else sum(len(turn.messages) for turn in before.path)


def reply_of(session: Session, reply: Any, *, param: str) -> tuple[Turn, tuple[Message, ...]]:
    """The last turn of a reply, and what had been said after it; CallError if the session has no such reply."""
    known = session.replies.get(str(reply).removeprefix("resp_").removeprefix("chatcmpl-"))
    if known is None:
        raise CallError(404, f"{param}: no reply {reply!r:.80} of this session", param=param)
    return known
