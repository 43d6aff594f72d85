"""Completions of the form `<think>…</think> <answer>…</answer>`.

Source: the format of DeepSeek-R1 (arXiv:2501.12948), which Cosmos-Reason1 (arXiv:2503.15558) takes for its
reinforcement learning.
"""

from __future__ import annotations

import re
from typing import Final

import attrs

_FORM: Final = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
_ANSWER: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TAGS: Final = ("<think>", "</think>", "<answer>", "</answer>")


@attrs.frozen(kw_only=True)
class Tagged:
    """What a completion says.

    Attributes:
        answer: What its only answer is, stripped; None without one, or with several.
        is_well_formed: Whether it is a thought and an answer, each tag once and in order, neither blank, and nothing
            else.
    """

    answer: str | None
    is_well_formed: bool


def read_tags(text: str) -> Tagged:
    """Read a completion."""
    answers = _ANSWER.findall(text)
    form = _FORM.fullmatch(text)
    is_whole = form is not None and all(part.strip() for part in form.groups())
    return Tagged(
        answer=answers[0].strip() if len(answers) == 1 else None,
        is_well_formed=is_whole and all(text.count(tag) == 1 for tag in _TAGS),
    )
