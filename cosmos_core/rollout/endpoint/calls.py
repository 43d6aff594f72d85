"""A call of the model by a client, whichever API it came through, and the reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from cosmos_core.types import JSON, Message


class CallError(Exception):
    """A call is refused: the status of HTTP, OpenAI's code and the key that is wrong, and a sentence."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, JSON]:
        """The error as OpenAI's API tells it."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@attrs.frozen(kw_only=True)
class Call:
    """A request of a client.

    Attributes:
        model: The name of the model that it asks for.
        messages: The whole history, or what is new since the reply `previous`.
        tools: The tools that the model is shown, as OpenAI's API has them.
        may_call: Whether it may call them; else what it writes is words.
        instructions: A system's turn before all others; empty: none.
        previous: The id of a reply of the same session that this one goes on from; empty: none.
        max_units: Most units of the reply; None for as many as the session has.
        stops: Texts before which the reply ends.
        num_choices: Replies that are asked for.
        with_logprobs: Whether the log-prob of each unit is asked for.
    """

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, JSON], ...] = ()
    may_call: bool = True
    instructions: str = ""
    previous: str = ""
    max_units: int | None = None
    stops: tuple[str, ...] = ()
    num_choices: int = 1
    with_logprobs: bool = False

    def history(self, past: tuple[Message, ...]) -> tuple[Message, ...]:
        """All messages, of which `past` are those up to the reply `previous`; raises CallError if nothing is asked."""
        first = (Message(role="system", content=self.instructions),) if self.instructions else ()
        messages = (*first, *past, *self.messages)
        if not messages:
            raise CallError(400, "there are no messages; give one at least", param="messages")
        if messages[-1].role == "assistant":
            raise CallError(400, "the last message is the model's own; end with another's", param="messages")
        return messages


@attrs.frozen(kw_only=True)
class Choice:
    """One reply of the model.

    Attributes:
        message: The turn, its calls of tools read out of it.
        reason: `stop`, `length` or `tool_calls`.
        logprobs: Each unit as text, and its log-prob; empty where not asked for.
        num_units: Units that were generated.
    """

    message: Message
    reason: str
    num_units: int
    logprobs: Sequence[tuple[str, float]] = ()


@attrs.frozen(kw_only=True)
class Reply:
    """The answer to a call: its id within the session, the choices, and the units of the prompt."""

    id: str
    model: str
    created: int
    choices: tuple[Choice, ...]
    num_prompt_units: int

    @property
    def num_units(self) -> int:
        """Units that were generated."""
        return sum(choice.num_units for choice in self.choices)
