"""What is wrong with a value, where: collected over a whole recipe, so that one run of the check shows everything."""

from __future__ import annotations

import json
from typing import Any, Final, TypeAlias

import attrs

from cosmos_core.errors import ConfigError

Key: TypeAlias = str | int

_LONGEST_VALUE: Final = 80


@attrs.frozen
class Problem:
    """One wrong value: the keys that lead to it, and what is wrong with it."""

    path: tuple[Key, ...]
    text: str

    def render(self, root: str) -> str:
        """`root.path: text`."""
        path = ".".join([*([root] if root else []), *(str(key) for key in self.path)])
        return f"{path}: {self.text}" if path else self.text


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
        return [Problem((key, *problem.path), problem.text) for problem in self.problems]

    def as_config_error(self, root: str) -> ConfigError:
        """The error for users, one line for each problem."""
        return ConfigError("\n".join(problem.render(root) for problem in self.problems))


def show(value: Any) -> str:
    """A value as a person would write it in a recipe, cut when long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"
