"""Replies of OpenAI's API, whole and in parts."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Final

from aiohttp import web

from cosmos_service_tools.answers import Part
from cosmos_service_tools.requests import Asked, ChatAsked


class Reply:
    """A reply to one request."""

    def __init__(self, name: str, asked: Asked, num_prompt_units: int) -> None:
        """Reply as the model `name` to prompts of so many tokens together."""
        self._is_chat: Final = isinstance(asked, ChatAsked)
        self._num_prompt_units: Final = num_prompt_units
        self._head: Final = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": name,
        }

    def whole(self, answers: Sequence[Sequence[Part]]) -> dict[str, Any]:
        """All answers, each by its parts."""
        choices = []
        for index, parts in enumerate(answers):
            text = "".join(part.text for part in parts)
            said = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
            choices.append({"index": index, **said, "finish_reason": parts[-1].reason, "logprobs": None})
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage([each[-1] for each in answers])}

    def part(self, part: Part, *, is_first: bool) -> dict[str, Any]:
        """A part of the only answer."""
        role = {"role": "assistant"} if is_first else {}
        said = {"delta": {**role, "content": part.text}} if self._is_chat else {"text": part.text}
        return self._chunk([{"index": 0, **said, "finish_reason": part.reason or None, "logprobs": None}])

    def usage(self, last: Part) -> dict[str, Any]:
        """What comes after the last part, if the request asked for the numbers of tokens."""
        return self._chunk([]) | {"usage": self._usage([last])}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}

    def _usage(self, last: Sequence[Part]) -> dict[str, int]:
        made = sum(part.num_units for part in last)
        given = self._num_prompt_units
        return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}


def error(message: str, status: int) -> dict[str, Any]:
    """The body of a refusal."""
    kind = "server_error" if status >= web.HTTPInternalServerError.status_code else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
