"""The entry point `reason-mock`: questions about made-up clips, drawn from the run's seed."""

from __future__ import annotations

import random
from typing import Final

import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.data import DrawnDataset
from cosmos_core.protocols import Dataset, DatasetCapabilities, DatasetContext, Provider, Split, hookimpl
from cosmos_core.types import Prompt
from cosmos_dataset_reason.clips import COLOURS, DIRECTIONS, OPPOSITE, Clip, data_url, draw_clip
from cosmos_dataset_reason.ontology import levels
from cosmos_dataset_reason.options import QuestionOptions
from cosmos_dataset_reason.prompts import ask, in_tags
from cosmos_dataset_reason.question import Question

_LETTERS: Final = "ABCD"


@attrs.frozen(kw_only=True)
class MockOptions(QuestionOptions):
    """The number of questions, and the care of the demonstrator."""

    train_rows: int = option(20_000, help="Rows of the train split.", validator=check.ge(1))
    heldout_rows: int = option(256, help="Rows of the held-out split.", validator=check.ge(0))
    careless: float = option(
        0.0,
        help="Share of the demonstrations of where the ball comes from that answer where it goes.",
        validator=check.and_(check.ge(0.0), check.le(1.0)),
    )


@attrs.frozen(kw_only=True)
class _Asked:
    """A kind of question: its text and label, the right answer, and the reasoning that leads to it."""

    text: str
    label: str
    answer: str
    reasoning: str


class ReasonMock(DrawnDataset):
    """The dataset: a clip of a ball that moves, and a question about it with four choices in one order."""

    def __init__(self, options: MockOptions, context: DatasetContext) -> None:
        super().__init__("reason-mock", context.seed, {"train": options.train_rows, "heldout": options.heldout_rows})
        self._options: Final = options

    def draw(self, rng: random.Random, split: Split) -> Prompt:
        """Draw a clip and a question about it."""
        clip = draw_clip(rng, heldout=split == "heldout")
        asked = rng.choice(_questions(clip))
        words = list(COLOURS if asked.answer in COLOURS else DIRECTIONS)
        choices = dict(zip(_LETTERS, words, strict=True))
        letters = {word: letter for letter, word in choices.items()}
        question = Question(
            text=asked.text, choices=choices, answers=(letters[asked.answer],), reasoning=asked.reasoning
        )
        prompt = ask(question, self._options, media=(data_url(clip.frames()),), labels=levels(asked.label))
        is_careless = rng.random() < self._options.careless
        if asked.label != "time/order" or not is_careless:
            return prompt
        goes = letters[clip.direction]
        return attrs.evolve(prompt, demonstration=in_tags(_moves(clip), goes) if self._options.thought else goes)


def _questions(clip: Clip) -> tuple[_Asked, ...]:
    came = OPPOSITE[clip.direction]
    return (
        _Asked(
            text="Which colour is the ball?",
            label="physics/attributes",
            answer=clip.colour,
            reasoning=f"The ball is {clip.colour}.",
        ),
        _Asked(text="Where does the ball go?", label="time/actions", answer=clip.direction, reasoning=_moves(clip)),
        _Asked(
            text="Where does the ball come from?",
            label="time/order",
            answer=came,
            reasoning=f"{_moves(clip)} It comes from the opposite, {came}.",
        ),
    )


def _moves(clip: Clip) -> str:
    return f"The ball moves {clip.direction}."


@hookimpl
def cosmos_dataset() -> Provider[Dataset]:
    """Provide questions about made-up clips."""
    capabilities = DatasetCapabilities(demonstrations=True, references=True)
    return Provider(create=ReasonMock, options=MockOptions, capabilities=capabilities)
