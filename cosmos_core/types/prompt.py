"""Prompts of datasets: one conditioning input each, with what rewards and demonstrations need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs

if TYPE_CHECKING:
    JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"
else:
    # Converters read annotations at run time and cannot resolve a recursive alias.
    JSON = Any

Scalar: TypeAlias = bool | int | float | str | None
"""A value of a single key."""


@attrs.frozen(kw_only=True)
class ToolCall:
    """A call of a tool by a model.

    Attributes:
        name: Of the tool.
        arguments: The JSON text of an object, as it was written.
        id: Names the call for the message that answers it; empty where nobody has named it.
    """

    name: str
    arguments: str
    id: str = ""


@attrs.frozen(kw_only=True)
class Message:
    """One turn of a chat.

    Attributes:
        role: Whose turn it is.
        content: What was said.
        tool_calls: The tools that a turn of the assistant calls.
        tool_call_id: Of a tool's turn, the `id` of the call that it answers.
        reasoning: What the assistant thought before it said the content, where its format tells the two apart.
        media: Locations of images that the turn shows, in order: local paths and `data:` URLs.
        places: Before which character of the content each of them stands, in order; empty: all before the first.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""
    media: tuple[str, ...] = ()
    places: tuple[int, ...] = ()

    @property
    def written(self) -> dict[str, Any]:
        """The turn without its images, as OpenAI's API writes it; what it does not have is left out."""
        written: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            written["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        more = {"tool_call_id": self.tool_call_id, "reasoning_content": self.reasoning}
        return written | {key: text for key, text in more.items() if text}


GIVEN_FRAMES: Final = "num_given_frames"
"""The key of metadata that says how many frames of its media a row gives a world model; 1 if it does not say."""


@attrs.frozen(kw_only=True)
class Prompt:
    """One dataset row, for language and world models alike.

    Attributes:
        text: Plain text, or the turns of a chat that the model's own template renders.
        reference: What rewards compare a completion with (an answer, a schema, a label); any JSON value.
        demonstration: A completion to imitate, for supervised algorithms; None where the row has none.
        rejected: A completion that is worse than `demonstration`, for algorithms that learn from preferences; None
            where the row has none.
        media: Locations (paths or URLs) of conditioning images or videos, in order; where they stand in the text is for
            the model to say. Turns of a chat may show others (`Message.media`).
        tools: The tools that the model may call in a chat, as objects of OpenAI's API (see `cosmos_core.types.tools`).
        metadata: Anything else the row carries; shown in samples, never interpreted by the core.
    """

    text: str | tuple[Message, ...]
    reference: JSON = None
    demonstration: str | None = None
    rejected: str | None = None
    media: tuple[str, ...] = ()
    tools: tuple[Mapping[str, JSON], ...] = ()
    metadata: Mapping[str, JSON] = attrs.field(factory=dict)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The turns without images, as OpenAI's API writes them; plain text is one turn of the user's."""
        turns = (Message(role="user", content=self.text),) if isinstance(self.text, str) else self.text
        return [turn.written for turn in turns]

    @property
    def shows_media(self) -> bool:
        """True if it shows images or videos: its own, or those of its turns."""
        return bool(self.media) or (not isinstance(self.text, str) and any(turn.media for turn in self.text))

    @property
    def words(self) -> str:
        """The text as people read it, each turn of a chat with its role and the tools that it calls."""
        if isinstance(self.text, str):
            return self.text
        said = []
        for message in self.text:
            calls = "".join(f"<{call.name}>{call.arguments}" for call in message.tool_calls)
            said.append(f"{message.role}: {message.content}{calls}")
        return "\n".join(said)
