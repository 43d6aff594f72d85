"""Completions of the form `<think>…</think> <answer>…</answer>`.

Source: the format of DeepSeek-R1 (arXiv:2501.12948), which Cosmos-Reason1 (arXiv:2503.15558) takes for its
reinforcement learning.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Final

import attrs

_FORM: Final = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
_TAGS: Final = ("<think>", "</think>", "<answer>", "</answer>")


@attrs.frozen(kw_only=True)
class Tagged:
    """The tagged parts of a completion.

    Attributes:
        answer: What its only answer is, stripped; None without one, or with several.
        is_well_formed: Whether it is a thought and an answer, each tag once and in order, neither blank, and nothing
            else.
    """

    answer: str | None
    is_well_formed: bool


def read_tags(text: str) -> Tagged:
    """Read a completion, in time that grows with its length alone."""
    answers = list(itertools.islice(_answers(text), 2))
    # The expression goes back and forth among tags that come more than once.
    form = _FORM.fullmatch(text) if all(text.count(tag) == 1 for tag in _TAGS) else None
    return Tagged(
        answer=answers[0].strip() if len(answers) == 1 else None,
        is_well_formed=form is not None and all(part.strip() for part in form.groups()),
    )


def _answers(text: str) -> Iterator[str]:
    """Yield what stands between an opening tag of an answer and the next closing one."""
    end = 0
    while (begin := text.find("<answer>", end)) >= 0 and (end := text.find("</answer>", begin)) >= 0:
        yield text[begin + len("<answer>") : end]
