"""One two-step problem: its numbers, its question, and the ways to work it out."""

from __future__ import annotations

import random
from typing import Final, Literal, TypeAlias

import attrs

from cosmos_core.data import is_held_out

Operator: TypeAlias = Literal["+", "-"]

HELDOUT_SHARE: Final = 0.2
"""Share of the (operands, operators) tuples that only the held-out split contains."""

NAMES: Final = ("Ann", "Ben", "Cara", "Dan", "Eva", "Finn", "Gia", "Hugo", "Ida", "Jack")
ITEMS: Final = ("apples", "books", "coins", "stamps", "cards", "shells", "pens", "marbles")
PHRASES: Final[dict[Operator, tuple[str, ...]]] = {
    "+": ("buys {} more", "finds {}"),
    "-": ("gives away {}", "loses {}"),
}
OPERATORS: Final[tuple[Operator, ...]] = ("+", "-")


@attrs.frozen(kw_only=True)
class Problem:
    """`start first_operator first_operand`, then `second_operator second_operand`; never below zero."""

    start: int
    first_operator: Operator
    first_operand: int
    second_operator: Operator
    second_operand: int

    @property
    def halfway(self) -> int:
        """The number after the first step."""
        return _apply(self.start, self.first_operator, self.first_operand)

    @property
    def answer(self) -> int:
        """The number in the end."""
        return _apply(self.halfway, self.second_operator, self.second_operand)

    @property
    def is_possible(self) -> bool:
        """True if nobody gives away more than there is."""
        return self.halfway >= 0 and self.answer >= 0

    @property
    def is_heldout(self) -> bool:
        """True if the tuple is held out, by a hash of it: the same in every run."""
        key = f"{self.start}{self.first_operator}{self.first_operand}{self.second_operator}{self.second_operand}"
        return is_held_out(key, HELDOUT_SHARE)

    def question(self, rng: random.Random) -> str:
        """The problem in words, about somebody and something drawn from `rng`."""
        name, items = rng.choice(NAMES), rng.choice(ITEMS)
        first = rng.choice(PHRASES[self.first_operator]).format(self.first_operand)
        second = rng.choice(PHRASES[self.second_operator]).format(self.second_operand)
        return f"{name} has {self.start} {items}, {first}, then {second}. How many {items} now?\n"

    def worked(self) -> str:
        """Both steps, and the right answer."""
        return f"{self._first_step}\n{self._second_step}\n#### {self.answer}"

    def stopped(self) -> str:
        """The mistake of stopping after the first step."""
        return f"{self._first_step}\n#### {self.halfway}"

    def mixed_up(self) -> str:
        """The mistake of working both steps and giving the first one's result as the answer."""
        return f"{self._first_step}\n{self._second_step}\n#### {self.halfway}"

    def miscounted(self) -> str:
        """The mistake of ending one too high."""
        return f"{self._first_step}\n{self._second_step}\n#### {self.answer + 1}"

    @property
    def _first_step(self) -> str:
        return f"{self.start}{self.first_operator}{self.first_operand}={self.halfway}"

    @property
    def _second_step(self) -> str:
        return f"{self.halfway}{self.second_operator}{self.second_operand}={self.answer}"


def draw_problem(rng: random.Random, *, max_operand: int, heldout: bool) -> Problem:
    """Draw a possible problem of one split."""
    while True:
        problem = Problem(
            start=rng.randint(1, max_operand),
            first_operator=rng.choice(OPERATORS),
            first_operand=rng.randint(1, max_operand),
            second_operator=rng.choice(OPERATORS),
            second_operand=rng.randint(1, max_operand),
        )
        if problem.is_possible and problem.is_heldout == heldout:
            return problem


def careless_demonstration(problem: Problem, rng: random.Random, *, careless: float, stops: float) -> str:
    """The text of a demonstrator who is careful as long as things go down and careless once they go up.

    Shares far from one half make imitation get the same kinds of problems right whatever the seed: those that begin
    by taking away, one in four. Most mistakes still have both steps, so that their arithmetic is practised.

    Args:
        problem: The problem.
        rng: Decides whether there is a mistake, and which.
        careless: Probability of a mistake where the first step adds; there is none elsewhere.
        stops: Probability that a mistake is to stop after that step; else it is to give its result as the answer.
    """
    if problem.first_operator == "-" or rng.random() >= careless:
        return problem.worked()
    return problem.stopped() if rng.random() < stops else problem.mixed_up()


def wrong_demonstration(problem: Problem, rng: random.Random, *, besides: str) -> str:
    """A demonstration with a mistake that gives a wrong answer.

    Args:
        problem: The problem.
        rng: Decides which mistake.
        besides: A demonstration that it must not be.
    """
    mistakes = [text for text in (problem.stopped(), problem.mixed_up()) if text != besides]
    if problem.halfway == problem.answer or not mistakes:
        return problem.miscounted()
    return rng.choice(mistakes)


def _apply(left: int, operator: Operator, right: int) -> int:
    return left + right if operator == "+" else left - right
