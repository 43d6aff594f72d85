"""Requests to a reward service and its answers: the JSON of both sides (see README)."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from cosmos_core.errors import DataError, PluginError
from cosmos_core.protocols import Completion, Score
from cosmos_core.types import JSON, Message, Prompt
from cosmos_core.types.tools import read_messages, read_tools

VERSION: Final = 1


def request_of(completions: Sequence[Completion]) -> JSON:
    """The body of a request to score completions."""
    return {"version": VERSION, "completions": [_completion(each) for each in completions]}


def completions_of(body: Any) -> list[Completion]:
    """The completions of a request.

    Raises:
        ValueError: It is none of this version.
    """
    try:
        if body["version"] != VERSION:
            raise ValueError(f"version {body['version']!r}; this service speaks version {VERSION}")
        return [_read(each) for each in body["completions"]]
    except (KeyError, TypeError, AttributeError, DataError) as error:
        raise ValueError(f"no request to score completions: {type(error).__name__}: {error}") from None


def answer_of(scores: Sequence[Score | str]) -> JSON:
    """The body of an answer: of each completion its score, or why it has none."""
    return {
        "scores": [
            {"error": each} if isinstance(each, str) else {"value": each.value, "details": dict(each.details)}
            for each in scores
        ]
    }


def scores_of(body: Any, number: int) -> list[Score | str]:
    """The scores of an answer.

    Raises:
        PluginError: They are not as many as completions, or one is neither a finite number nor an error.
    """
    if not isinstance(body, Mapping) or not isinstance(body.get("scores"), list):
        raise PluginError(f"the answer has no list of scores: {body!r:.200}")
    if len(body["scores"]) != number:
        raise PluginError(f"{len(body['scores'])} scores for {number} completions")
    return [_score(each) for each in body["scores"]]


def _completion(completion: Completion) -> dict[str, JSON]:
    prompt = completion.prompt
    return {
        "prompt": prompt.text if isinstance(prompt.text, str) else _messages(prompt.text),
        "reference": prompt.reference,
        "metadata": dict(prompt.metadata),
        **({"tools": [dict(tool) for tool in prompt.tools]} if prompt.tools else {}),
        "text": completion.text,
        "turns": _messages(completion.turns),
        "truncated": completion.truncated,
        "num_units": completion.num_units,
    }


def _messages(turns: Sequence[Message]) -> list[JSON]:
    return [turn.written for turn in turns]


def _read(item: Mapping[str, Any]) -> Completion:
    text = item["prompt"]
    return Completion(
        prompt=Prompt(
            text=text if isinstance(text, str) else _turns(text),
            reference=item["reference"],
            metadata=item["metadata"],
            tools=read_tools(item.get("tools", ())),
        ),
        text=item["text"],
        turns=_turns(item["turns"]),
        truncated=item["truncated"],
        num_units=item["num_units"],
    )


def _turns(items: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    return read_messages(items) if items else ()


def _score(item: Any) -> Score | str:
    if isinstance(item, Mapping) and isinstance(item.get("error"), str):
        return str(item["error"])
    value = item.get("value") if isinstance(item, Mapping) else None
    details = item.get("details", {}) if _is_finite(value) else None
    if value is None or not isinstance(details, Mapping):
        raise PluginError(f"a score that is neither a finite number nor an error: {item!r:.200}")
    return Score(value=float(value), details=details)


def _is_finite(value: Any) -> bool:
    """True if it is a number that a float can hold; JSON has some of any length."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max
