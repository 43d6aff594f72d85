"""Requests of OpenAI's API, as far as they are answered; the others are refused by a sentence."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from cosmos_core.errors import DataError
from cosmos_core.protocols import Sampling
from cosmos_core.types import Message

_MOST: Final = 16
"""Answers of a request."""
_WITHOUT_EFFECT: Final = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
_DEFAULTS: Final[dict[str, tuple[Any, ...]]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
}
"""Keys that are taken with these values, which ask for nothing."""
_Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]


class _TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class _Turn(msgspec.Struct):
    role: str
    content: str | list[_TextPart]


class StreamOptions(msgspec.Struct):
    """Options of a stream."""

    include_usage: bool = False


class _Asked(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str = ""
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_tokens: _Positive | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=_MOST)] = 1
    seed: int | None = None
    stop: str | list[Annotated[str, msgspec.Meta(min_length=1)]] = ""
    stream: bool = False
    stream_options: StreamOptions = msgspec.field(default_factory=StreamOptions)

    @property
    def stops(self) -> list[str]:
        """Texts before which an answer ends."""
        return self.stop if isinstance(self.stop, list) else [self.stop] if self.stop else []

    @property
    def first_seed(self) -> int:
        """Seed of the first answer; each other one has the next."""
        return secrets.randbits(32) if self.seed is None else self.seed

    def sampling(self, default: int) -> Sampling:
        """How to draw an answer, of at most `default` tokens if the request does not say."""
        most = self.most or default
        return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, max_units=most)

    @property
    def most(self) -> int | None:
        """Most tokens of an answer."""
        return self.max_tokens


class ChatAsked(_Asked, kw_only=True, forbid_unknown_fields=True):
    """A request of `/v1/chat/completions`."""

    messages: Annotated[list[_Turn], msgspec.Meta(min_length=1)]
    max_completion_tokens: _Positive | None = None

    @property
    def most(self) -> int | None:
        """Most tokens of an answer."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def prompts(self) -> list[Sequence[Message] | str]:
        """The chat."""
        return [[Message(role=turn.role, content=_words(turn)) for turn in self.messages]]


class CompletionAsked(_Asked, kw_only=True, forbid_unknown_fields=True):
    """A request of `/v1/completions`."""

    prompt: str | Annotated[list[str], msgspec.Meta(min_length=1, max_length=_MOST)]

    @property
    def prompts(self) -> list[Sequence[Message] | str]:
        """The texts to go on from."""
        return [self.prompt] if isinstance(self.prompt, str) else list(self.prompt)


Asked: TypeAlias = ChatAsked | CompletionAsked


def read(body: bytes, kind: type[Asked]) -> Asked:
    """The request in a body; raises DataError if it is none, or asks for what there is not."""
    try:
        data = msgspec.json.decode(body, type=dict[str, Any])
        told = {key: value for key, value in data.items() if value is not None and key not in _WITHOUT_EFFECT}
        told = {key: value for key, value in told.items() if value not in _DEFAULTS.get(key, ())}
        if unknown := [key for key in told if key in _DEFAULTS]:
            raise DataError(f"{unknown[0]}: this server cannot do that; leave it out, or serve with --engine vllm")
        return msgspec.convert(told, kind)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"not a request: {error}") from error


def _words(turn: _Turn) -> str:
    return turn.content if isinstance(turn.content, str) else "".join(part.text for part in turn.content)
