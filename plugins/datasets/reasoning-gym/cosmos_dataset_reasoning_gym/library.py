"""The reasoning-gym library: its tasks by name, and their entries as JSON. It is imported when a task is made."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import fields
from importlib.util import find_spec
from typing import Any, Final

from cosmos_core.config.problems import suggestion
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.types import JSON

OURS: Final = ("seed", "size")
"""Options of every task that are not the user's: the run's seed and the dataset's sizes say them."""
UNREPEATABLE: Final = frozenset(
    ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")
)
"""Tasks of release 0.1.25 that iterate over sets of text: another process draws other entries from the same seed."""
_LISTS: Final = frozenset(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"))
_FORMULAS: Final = frozenset(("countdown", "intermediate_integration", "puzzle24", "simple_integration"))
"""Tasks of release 0.1.25 whose verifiers evaluate answers as Python."""
_FUNCTIONS: Final = "a?(?:sin|cos|tan)h?|sec|csc|cot|sqrt|exp|log|ln|erf|pi|Abs"
_FORMULA: Final = re.compile(
    rf"(?:[\s0-9+\-*/^()!,]|\.(?!\s*[A-Za-z])|(?<![A-Za-z])(?:{_FUNCTIONS}|[A-Za-z])(?![A-Za-z]))*"
)
_PARTS: Final = ("question", "answer", "metadata")


def absent() -> str:
    """Say that the library is not installed, and what to do; empty where it is."""
    if find_spec("reasoning_gym") is None:
        return "reasoning-gym is not installed; run: pip install 'cosmos-dataset-reasoning-gym[library]'"
    return ""


def make_task(name: str, config: Mapping[str, JSON], path: str, **ours: int) -> Any:
    """Make a task, whose `task[index]` are entries, and whose `score_answer(answer, entry)` verifies.

    Args:
        name: Of the task.
        config: Its options.
        path: Key path of the table with `task` and `config`, for messages.
        ours: Its `seed` and `size`, where they matter.

    Raises:
        ConfigError: The library is absent, there is no such task, or it cannot be made with these options.
    """
    if missing := absent():
        raise ConfigError(f"{path}: {missing}")
    import reasoning_gym  # noqa: PLC0415 - it imports sympy and matplotlib
    from reasoning_gym.factory import DATASETS  # noqa: PLC0415

    names = set(DATASETS) - {"composite"} - UNREPEATABLE
    if name in UNREPEATABLE:
        raise ConfigError(f"{path}.task: {name!r} draws other entries in each process, so that no run can use it")
    if name not in names:
        raise ConfigError(f"{path}.task: reasoning-gym has no task {name!r}; {suggestion(name, names, limit=3)}")
    known = {each.name for each in fields(DATASETS[name][1])} - {*OURS}
    for key in config:
        if key in OURS:
            raise ConfigError(f"{path}.config.{key}: `run.seed`, `train_rows` and `heldout_rows` decide; remove it")
        if key not in known:
            raise ConfigError(f"{path}.config.{key}: task {name!r} has no such option; {suggestion(key, known)}")
    try:
        return reasoning_gym.create_dataset(name, **config, **ours)
    except Exception as error:  # each task validates its options in its own way, mostly by assertions
        given, said = f"{ {**config, **ours}!r:.200}", f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path}: task {name!r} cannot be made with {given}: {said}") from error


def is_plain(answer: str, name: str, entry: Mapping[str, JSON]) -> bool:
    """Whether a verifier may have an answer: one that evaluates it has plain formulas and lists only."""
    if name not in _FORMULAS | _LISTS or answer == entry.get("answer"):
        return True
    if name in _FORMULAS:
        return _FORMULA.fullmatch(answer) is not None
    try:
        ast.literal_eval(answer)
    except SyntaxError:  # nor is it run
        return True
    except (ValueError, TypeError, MemoryError, RecursionError):
        return False
    return True


def entry_as_json(entry: Mapping[str, Any], name: str) -> dict[str, JSON]:
    """The parts of an entry that verifiers read, as JSON: tuples become lists.

    Raises:
        DataError: JSON cannot hold it.
    """
    try:
        text = json.dumps({part: entry[part] for part in _PARTS}, allow_nan=False)
        made: dict[str, JSON] = json.loads(text, parse_int=_bounded)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"task {name!r} of reasoning-gym: JSON cannot hold what a verifier needs of entry "
            f"{entry['metadata'].get('source_index')}: {error}; the row is left out, take another task if many are"
        ) from error
    return made


def _bounded(digits: str) -> int:
    if (number := int(digits)) not in range(-(2**63), 2**64):
        raise ValueError(f"{digits:.40} has more than 64 bits")
    return number
