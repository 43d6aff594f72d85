"""Problems of a recipe: each with its key and the nearest known name, collected so that one check shows all."""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Collection, Iterable
from typing import Any, Final, TypeAlias

import attrs

Key: TypeAlias = str | int

_LONGEST_VALUE: Final = 80
ELSEWHERE: Final = {
    "actor": "policy",
    "eval": "evaluation",
    "gpu": "cuda",
    "learning_rate": "lr",
    "max_tokens": "max_units",
    "num_generations": "group_size",
    "reward_function": "reward",
    "train": "run",
}
"""Words of other frameworks, and the key or value that is the same here."""


@attrs.frozen
class Problem:
    """One wrong value: the keys that lead to it, and what is wrong with it.

    Attributes:
        known: Of an unknown key: the keys of its table, and of tables below with their dotted names.
    """

    path: tuple[Key, ...]
    text: str
    known: tuple[Collection[str], Collection[str]] | None = None

    def render(self, root: str) -> str:
        """`root.path: text`."""
        keys = [*([root] if root else []), *map(str, self.path)]
        hint = f"; {suggestion(keys[-1], *self.known, table='.'.join(keys[:-1]))}" if self.known else ""
        return f"{'.'.join(keys)}: {self.text}{hint}" if keys else self.text


class RefusedError(ValueError):
    """Problems found below one value; each container on the way up puts its key before their paths."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(problem.render("") for problem in problems))
        self.problems: Final = problems

    @classmethod
    def of(cls, text: str) -> RefusedError:
        """A refusal of the value itself."""
        return cls([Problem((), text)])

    def under(self, key: Key) -> list[Problem]:
        """The problems as seen from the container that holds the value at `key`."""
        return [attrs.evolve(problem, path=(key, *problem.path)) for problem in self.problems]


def show(value: Any) -> str:
    """A value as a person would write it in a recipe, cut when long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"


def nearest(name: str, known: Iterable[str], *, limit: int = 1) -> list[str]:
    """Known names that look like `name`, best first; case, `-` and `_` do not count."""
    by_plain: dict[str, list[str]] = {}
    for candidate in known:
        by_plain.setdefault(_plain(candidate), []).append(candidate)
    close = difflib.get_close_matches(_plain(name), by_plain, n=limit, cutoff=0.6)
    return [candidate for plain in close for candidate in by_plain[plain]][:limit]


def suggestion(name: str, known: Iterable[str], nested: Iterable[str] = (), *, table: str = "", limit: int = 1) -> str:
    """`did you mean …?`, or what is allowed if nothing is alike.

    Of tables below it knows dotted names (`nested`), and tells them with that of `table`.
    """
    candidates = sorted(known)
    homes: dict[str, list[str]] = {}
    tables = (table for path in nested for table in itertools.accumulate(path.split("."), "{}.{}".format))
    for path in dict.fromkeys(tables):
        homes.setdefault(path.rpartition(".")[2], []).append(path)
    homes |= {own: [own] for own in candidates}
    homes = {**{word: homes[own] for word, own in ELSEWHERE.items() if own in homes}, **homes}
    if close := [path for found in nearest(name, homes, limit=limit) for path in homes[found]]:
        close = [f"{table}.{path}" if table and path not in candidates else path for path in close]
        return f"did you mean {' or '.join(close)}?"
    return f"allowed: {', '.join(candidates)}" if candidates else "nothing is allowed here"


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
