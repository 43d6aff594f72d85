"""Rows that are made when they are asked for."""

from __future__ import annotations

import random

import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.data import DrawnDataset
from cosmos_core.protocols import Dataset, DatasetCapabilities, DatasetContext, Provider, Split, hookimpl
from cosmos_core.types import Prompt
from cosmos_dataset_arithmetic.problem import careless_demonstration, draw_problem, wrong_demonstration


@attrs.frozen(kw_only=True)
class ArithmeticOptions:
    """Options of `arithmetic`."""

    max_operand: int = option(
        9,
        help="Operands are drawn from 1 to this.",
        validator=check.and_(check.ge(5), check.le(999)),
    )
    train_rows: int = option(20_000, help="Rows of the train split.", validator=check.ge(1))
    heldout_rows: int = option(256, help="Rows of the held-out split.", validator=check.ge(0))
    careless: float = option(
        0.8,
        help="Share of the demonstrations with a mistake, of problems whose first step adds.",
        validator=check.and_(check.ge(0.0), check.le(1.0)),
    )
    stops: float = option(
        0.3,
        help="Share of the mistakes that stop after the first step; the others give its result as the answer.",
        validator=check.and_(check.ge(0.0), check.le(1.0)),
    )
    preferences: bool = option(
        False, help="Whether each row has a rejected completion, with a mistake, beside its demonstration."
    )


class Arithmetic(DrawnDataset):
    """The dataset: rows are drawn from the run's seed."""

    def __init__(self, options: ArithmeticOptions, context: DatasetContext) -> None:
        super().__init__("arithmetic", context.seed, {"train": options.train_rows, "heldout": options.heldout_rows})
        self._options = options

    def draw(self, rng: random.Random, split: Split) -> Prompt:
        """Draw a problem, its words, its demonstration, and a worse one if the options ask for it."""
        problem = draw_problem(rng, max_operand=self._options.max_operand, heldout=split == "heldout")
        question = problem.question(rng)
        demonstration = careless_demonstration(problem, rng, careless=self._options.careless, stops=self._options.stops)
        rejected = wrong_demonstration(problem, rng, besides=demonstration) if self._options.preferences else None
        return Prompt(text=question, reference=str(problem.answer), demonstration=demonstration, rejected=rejected)


@hookimpl
def cosmos_dataset() -> Provider[Dataset]:
    """Provide the arithmetic word problems."""
    capabilities = DatasetCapabilities(demonstrations=True, references=True, preferences=True)
    return Provider(create=Arithmetic, options=ArithmeticOptions, capabilities=capabilities)
