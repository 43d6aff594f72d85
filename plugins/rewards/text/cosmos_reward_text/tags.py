"""Reward `format`: the text is `<think>…</think> <answer>…</answer>`, or other tags."""

from __future__ import annotations

import re
from typing import Final, Literal

import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.errors import ConfigError
from cosmos_core.protocols import Completion, Provider, Reward, RewardCapabilities, RewardContext, Score, hookimpl
from cosmos_reward_text.answer import TAG


@attrs.frozen(kw_only=True)
class FormatOptions:
    """Options of `format`."""

    tags: tuple[str, ...] = option(
        ("think", "answer"),
        help="Tags, in the order in which they must come.",
        validator=(check.min_len(1), check.deep_iterable(TAG)),
    )
    begins_inside: bool = option(
        False, help="Whether the prompt ends with the first opening tag, so that the completion begins after it."
    )
    outside: Literal["space", "anything"] = option("space", help="What may stand before, between and after the pairs.")
    empty: bool = option(False, help="Whether there may be nothing but white space in a pair.")


class Format:
    """1 where each pair of tags is there once, closed, in order and not inside another, else 0."""

    def __init__(self, options: FormatOptions, context: RewardContext) -> None:  # noqa: ARG002 - the kind's signature
        self._options: Final = options
        if len(set(options.tags)) < len(options.tags):
            raise ConfigError(f"tags: {', '.join(options.tags)} has one tag twice; each pair comes once")
        names = "|".join(map(re.escape, options.tags))
        self._any: Final = re.compile(rf"<(/?)({names})>")

    def score(self, completion: Completion) -> Score:
        """Look at the tags."""
        fault = self._fault(completion.own)
        return Score(value=float(not fault), details={"fault": fault} if fault else {})

    def _fault(self, text: str) -> str:
        """The fault; empty if there is none."""
        options = self._options
        text = f"<{options.tags[0]}>{text}" if options.begins_inside else text
        marks = list(self._any.finditer(text))
        found = [mark[0] for mark in marks]
        expected = [mark for tag in options.tags for mark in (f"<{tag}>", f"</{tag}>")]
        if found != expected:
            return next(
                (f"{mark} comes {found.count(mark)} times" for mark in expected if found.count(mark) != 1),
                "the tags come in another order",
            )
        # What stands before, in, between, in, ..., after the pairs.
        edges = [0, *(edge for mark in marks for edge in mark.span()), len(text)]
        parts = [text[begin:end] for begin, end in zip(edges[::2], edges[1::2], strict=True)]
        if options.outside == "space" and any(part.strip() for part in parts[::2]):
            return "there is text outside of the tags"
        if not options.empty and not all(part.strip() for part in parts[1::2]):
            return "there is nothing in a pair of tags"
        return ""


@hookimpl
def cosmos_reward() -> Provider[Reward]:
    """Provide the format."""
    return Provider(create=Format, options=FormatOptions, capabilities=RewardCapabilities())
