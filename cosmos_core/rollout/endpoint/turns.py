"""Turns of the model as replies to calls."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import attrs
import numpy as np

from cosmos_core.protocols.model import MultiTurnModel, ReadTurn
from cosmos_core.rollout.endpoint.calls import Call
from cosmos_core.types import Message, Prompt
from cosmos_core.types.tools import names_of


def stop_in(decode: Callable[[np.ndarray], str], ids: np.ndarray, num_new: int, stops: Sequence[str]) -> int:
    """The units after which one of the texts is there, of which the last are new; 0: none is."""
    if not stops or not any(stop in decode(ids) for stop in stops):
        return 0
    sizes = range(len(ids) - num_new + 1, len(ids) + 1)
    return next(size for size in sizes if any(stop in decode(ids[:size]) for stop in stops))


def read_reply(
    model: MultiTurnModel, decode: Callable[[np.ndarray], str], call: Call, messages: Sequence[Message], ids: np.ndarray
) -> ReadTurn:
    """Read a turn after messages, up to a text that ends it; what calls a tool that there is not is words."""
    tools = call.tools if call.may_call else ()
    read = model.read_turn(Prompt(text=tuple(messages), tools=tools), ids.tolist())
    message, malformed = read.message, read.malformed
    known = names_of(call.tools)
    if unknown := [each.name for each in message.tool_calls if each.name not in known]:
        message = Message(role="assistant", content=decode(ids), reasoning=message.reasoning)
        malformed = (*malformed, f"it calls {unknown[0]!r:.80}, and the tools are {', '.join(known)}")
    made = tuple(attrs.evolve(each, id=each.id or f"call_{secrets.token_hex(12)}") for each in message.tool_calls)
    content = before_stop(message.content, call.stops)
    return ReadTurn(message=attrs.evolve(message, content=content, tool_calls=made), malformed=malformed)


def before_stop(text: str, stops: Sequence[str]) -> str:
    """A text up to the first of those that end it."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)]
