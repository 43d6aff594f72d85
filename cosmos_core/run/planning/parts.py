"""Records of everything that a recipe selects: capabilities, facts, and what rows are like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs

from cosmos_core.config.job import Job, Stage
from cosmos_core.config.schema import Recipe
from cosmos_core.errors import DataError
from cosmos_core.protocols import (
    AlgorithmCapabilities,
    Dataset,
    DatasetCapabilities,
    EngineCapabilities,
    EnvironmentCapabilities,
    Model,
    ModelCapabilities,
    ModelFacts,
    Preflight,
    Reward,
    RewardCapabilities,
    Split,
)
from cosmos_core.protocols.dataset import Omission
from cosmos_core.protocols.frozen import Comparison, FrozenRole
from cosmos_core.protocols.model import Record
from cosmos_core.run.planning.first_row import FirstRow
from cosmos_core.types import Payload, Prompt
from cosmos_core.types.prompt import GIVEN_FRAMES


@attrs.frozen(kw_only=True)
class Measured:
    """Properties of some rows, spread over the train split.

    Attributes:
        shortest_prompt: Units of the shortest prompt.
        longest_prompt: Units of the longest prompt.
        num_heldout: First held-out rows looked at; none where nothing is evaluated.
        num_unusable: Of the rows looked at, those that the dataset or the model refuses.
        fault: Why the first of these is refused.
        num_bare: Of the others, those without a demonstration; `first_bare` is the number of the first.
        num_too_long: Those whose prompt does not fit with a completion, or a demonstration; their lengths do count.
        given_frames: Fewest frames that one of them gives a world model.
        num_vetted: Demonstrations that the model was asked about (`vet`) and would take.
        num_unfit: Those that `dataset.min_prompt_units` and `max_prompt_units` leave out; their lengths do not count.
    """

    num_rows: int
    shortest_prompt: int
    longest_prompt: int
    num_demonstrations: int = 0
    num_preferences: int = 0
    num_with_media: int = 0
    given_frames: int = 0
    num_heldout: int = 0
    num_heldout_demonstrations: int = 0
    num_unusable: int = 0
    fault: str = ""
    num_bare: int = 0
    first_bare: int = 0
    num_unfit: int = 0
    num_too_long: int = 0
    num_vetted: int = 0


@attrs.frozen(kw_only=True)
class FrozenFacts:
    """Facts of a frozen model; `misfit` is the first row that it encodes otherwise than the policy, empty if none."""

    facts: ModelFacts
    misfit: str
    plugin: str
    capabilities: ModelCapabilities


@attrs.frozen(kw_only=True)
class Parts:
    """The capabilities of everything that a recipe selects.

    Attributes:
        stages: Each stage with its algorithm's capabilities, in order.
        measured: What some of the train rows are like.
        first_row: The first train row as the model and the rewards take it.
        omitted: Rows that the dataset leaves out of each split, by reason.
        records: What the model's options ask the engine to record.
        preflight: What the engine says of the run.
        is_multi_turn: Whether the model encodes turns that are not its own (`MultiTurnModel`).
        sees_turns: Whether any of these turns may show images (`DialogueVision`).
        consults: Of each stage whose algorithm consults frozen models, by index: which, and by which comparison.
        imitates: Demonstrations for each group, of stages whose algorithm imitates some beside rollouts, by index.
        frozen: What was found of the frozen models.
        unmet: What the algorithms need of models that the recipe does not have.
        absent: What rewards and devices lack on this machine, and what to do: such a run can be planned, not started.
    """

    model: ModelCapabilities
    facts: ModelFacts
    dataset: DatasetCapabilities
    stages: Sequence[tuple[Stage, AlgorithmCapabilities]]
    rewards: Sequence[RewardCapabilities]
    engine: EngineCapabilities | None
    num_train_rows: int
    num_heldout_rows: int
    measured: Measured
    first_row: FirstRow | None = None
    records: Sequence[Record] = ()
    environment: EnvironmentCapabilities | None = None
    omitted: Mapping[Split, tuple[Omission, ...]] = attrs.field(factory=dict)
    preflight: Preflight = Preflight()
    is_multi_turn: bool = True
    sees_turns: bool = False
    consults: Mapping[int, Mapping[FrozenRole, Comparison | None]] = attrs.field(factory=dict)
    imitates: Mapping[int, int] = attrs.field(factory=dict)
    frozen: Mapping[FrozenRole, FrozenFacts] = attrs.field(factory=dict)
    unmet: Sequence[str] = ()
    absent: Sequence[str] = ()

    @property
    def has_tokens(self) -> bool:
        """True if the model decides tokens; decisions of latents are forwards of their own, in no context."""
        return "tokens" in self.model.payload_kinds

    @property
    def is_plain(self) -> bool:
        """True if the first row is plain text that the model goes on from: no chat, and no environment answers."""
        first = self.first_row
        return self.has_tokens and self.environment is None and first is not None and isinstance(first.prompt.text, str)


_MEASURED_PROMPTS: Final = 200
_VETTED: Final = 4
"""Demonstrations that the model is shown, fit or not: a video takes a while to read."""
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model", "tekken.json")


def look_at_rows(
    model: Model,
    dataset: Dataset,
    rewards: Sequence[Reward],
    sizes: Mapping[Split, int],
    recipe: Recipe,
    *,
    imitates: bool,
    longest: int,
) -> Measured:
    """Look at some encoded rows, spread over the train split; unusable ones are passed over, as in the run.

    The rewards vet them; where the run imitates, a model that vets looks at demonstrations, too. `longest` is the most
    units of a prompt of tokens that what follows it fits beside.
    """
    num_rows = sizes["train"]
    count = min(num_rows, _MEASURED_PROMPTS)
    num_heldout = min(recipe.evaluation.prompts, sizes["heldout"], _MEASURED_PROMPTS)
    counted: Counter[str] = Counter()
    lengths: list[int] = []
    given: list[int] = []
    bare: list[int] = []
    fault = ""
    for index in (number * num_rows // count for number in range(count)):
        try:
            prompt = dataset.row("train", index)
            payload = _encoded(prompt, model, rewards)
            if imitates:
                _vet(model, prompt, counted)
        except DataError as error:
            counted["num_unusable"] += 1
            fault = fault or str(error)
            continue
        is_shown = prompt.demonstration is not None
        counted["num_demonstrations"] += is_shown
        bare += [] if is_shown else [index]
        counted["num_preferences"] += is_shown and prompt.rejected is not None
        counted["num_with_media"] += prompt.shows_media
        given.append(_given_frames(prompt, payload))
        if "prompt" in payload.arrays:
            num_units = payload.arrays["prompt"].shape[0]
            if recipe.dataset.unfit(num_units)[0]:
                counted["num_unfit"] += 1
            else:
                lengths.append(num_units)
                counted["num_too_long"] += payload.kind == "tokens" and num_units > longest
    del counted["shown"]
    return Measured(
        num_rows=count,
        shortest_prompt=min(lengths, default=0),
        longest_prompt=max(lengths, default=0),
        num_heldout=num_heldout,
        num_heldout_demonstrations=sum(_has_demonstration(dataset, index) for index in range(num_heldout)),
        fault=fault,
        num_bare=len(bare),
        first_bare=bare[0] if bare else 0,
        given_frames=min(given, default=0),
        **counted,
    )


def _encoded(prompt: Prompt, model: Model, rewards: Sequence[Reward]) -> Payload:
    """A row as the model encodes it; the rewards vet it, too."""
    payload = model.encode(prompt)
    for reward in rewards:
        if hasattr(reward, "vet"):
            reward.vet(prompt)
    return payload


def _vet(model: Model, prompt: Prompt, counted: Counter[str]) -> None:
    """Show the model a demonstration, if it vets them and has not been shown enough."""
    if prompt.demonstration is not None and hasattr(model, "vet") and counted["shown"] < _VETTED:
        counted["shown"] += 1
        model.vet(prompt)
        counted["num_vetted"] += 1


def _given_frames(prompt: Prompt, payload: Payload) -> int:
    """Frames that a row gives a world model, as the model has read it."""
    number = prompt.metadata.get(GIVEN_FRAMES, int(bool(prompt.media)))
    return number if payload.kind == "latents" and isinstance(number, int) else 0


def _has_demonstration(dataset: Dataset, index: int) -> bool:
    try:
        return dataset.row("heldout", index).demonstration is not None
    except DataError:
        return False


def lacks_tokenizer(job: Job) -> bool:
    """True if the recipe's tokenizer is to be made: always, or where the checkpoint is a folder without one."""
    model = job.recipe.model
    assert model.tokenizer is not None
    if model.path is None or not model.tokenizer.if_missing:
        return True
    folder = job.recipe_directory / Path(model.path).expanduser()
    return folder.is_dir() and not any((folder / name).is_file() for name in _TOKENIZER_FILES)


def texts(dataset: Dataset, num_rows: int) -> Iterator[str]:
    """Texts of the train split to make a tokenizer from: prompts as they read, and demonstrations."""
    num_read, fault = 0, ""
    for index in range(num_rows):
        try:
            prompt: Prompt = dataset.row("train", index)
        except DataError as error:
            fault = fault or str(error)
            continue
        num_read += 1
        yield from [prompt.text] if isinstance(prompt.text, str) else (turn.content for turn in prompt.text)
        if prompt.demonstration is not None:
            yield prompt.demonstration
    if fault and not num_read:
        raise DataError(f"none of {num_rows} train rows can be used to make a tokenizer from; the first: {fault}")
