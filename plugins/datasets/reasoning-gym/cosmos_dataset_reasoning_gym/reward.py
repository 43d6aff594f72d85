"""The entry point `reasoning-gym-score`: a completion's answer, scored by the verifier of its row's task."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final, Literal

import attrs

from cosmos_core.config import option
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.protocols import Completion, Provider, Reward, RewardCapabilities, RewardContext, Score, hookimpl
from cosmos_core.types import JSON, Prompt
from cosmos_dataset_reasoning_gym.library import absent, is_plain, make_task

_SHOWN: Final = 200


@attrs.frozen(kw_only=True)
class ScoreOptions:
    """Options of `reasoning-gym-score`."""

    answer: Literal["tags", "last-line", "pattern"] = option(
        "tags",
        help="Where a completion has its answer: in the last `<answer>…</answer>`, on its last line that is not blank, "
        "or where `pattern` finds it.",
    )
    pattern: str | None = option(
        None, help="Regular expression of Python's `re`: the answer is the last group of its last match."
    )
    partial: bool = option(
        True, help="Whether verifiers may give a part of the credit; otherwise less than 1 is 0, and the mean accuracy."
    )

    def __attrs_post_init__(self) -> None:
        if (self.pattern is None) == (self.answer == "pattern"):
            raise ValueError('`answer = "pattern"` needs `pattern`, and nothing else does')
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise ValueError(f"pattern: {self.pattern!r} is no regular expression: {error}") from None


class VerifierReward:
    """The verifier's score, from 0 to 1; 0 where there is no answer. A verifier that fails gives no score."""

    def __init__(self, options: ScoreOptions, context: RewardContext) -> None:
        self._options: Final = options
        self._name: Final = context.name
        self._tasks: Final[dict[str, Any]] = {}

    def vet(self, prompt: Prompt) -> None:
        """Look at a prompt's reference.

        Raises:
            DataError: It is not of the dataset `reasoning-gym`.
        """
        self._parts(prompt)

    def absent(self) -> str:
        """Say that the library is not installed."""
        return absent()

    def load(self) -> None:
        """Import the library.

        Raises:
            ConfigError: It is not installed.
        """
        if missing := absent():
            raise ConfigError(f"reward {self._name}: {missing}")
        import reasoning_gym  # noqa: F401, PLC0415 - it imports sympy and matplotlib

    def score(self, completion: Completion) -> Score:
        """Score one completion.

        Raises:
            DataError: The prompt's reference is unusable, or the verifier gives no number.
        """
        task, entry = self._parts(completion.prompt)
        answer = self._answer(completion.own)
        if not answer:
            return Score(value=0.0, details={"answer": None})
        if not is_plain(answer, task, entry):
            refused = "it is no plain formula or list"
            return Score(value=0.0, details={"answer": answer[-_SHOWN:], "task": task, "refused": refused})
        value: Any = self._verifier(completion.prompt).score_answer(answer, entry)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise DataError(f"reward {self._name}: the verifier of {task!r} gave {value!r:.100} for {answer!r:.100}")
        is_none = value < 1.0 and not self._options.partial
        return Score(value=0.0 if is_none else float(value), details={"answer": answer[-_SHOWN:], "task": task})

    def _verifier(self, prompt: Prompt) -> Any:
        """The task of a row; made once for all rows of the same options."""
        reference: Any = prompt.reference
        task, config = reference["task"], reference["config"]
        key = json.dumps([task, config], sort_keys=True)
        if key not in self._tasks:
            self._tasks[key] = make_task(task, config, f"reward {self._name}: reference")
        return self._tasks[key]

    def _parts(self, prompt: Prompt) -> tuple[str, Mapping[str, JSON]]:
        """The task's name and the entry in a reference."""
        reference = prompt.reference
        if isinstance(reference, Mapping):
            task, config, entry = (reference.get(name) for name in ("task", "config", "entry"))
            if isinstance(task, str) and isinstance(config, Mapping) and isinstance(entry, Mapping):
                return task, entry
        raise DataError(
            f"reward {self._name}: the reference {reference!r:.100} has no task, config and entry of reasoning-gym; "
            'use it with [dataset] plugin = "reasoning-gym"'
        )

    def _answer(self, text: str) -> str | None:
        """The answer in a completion; None or empty if there is none."""
        if self._options.answer == "tags":
            before, closing, _ = text.rpartition("</answer>")
            _, opening, inside = before.rpartition("<answer>")
            return inside.strip() if closing and opening else None
        if self._options.pattern is None:
            return text.strip().rpartition("\n")[2].strip()
        matches = list(re.finditer(self._options.pattern, text))
        found = matches[-1] if matches else None
        return None if found is None else (found[found.re.groups] or "").strip()


@hookimpl
def cosmos_reward() -> Provider[Reward]:
    """Provide the verifiers of reasoning-gym."""
    return Provider(create=VerifierReward, options=ScoreOptions, capabilities=RewardCapabilities())
