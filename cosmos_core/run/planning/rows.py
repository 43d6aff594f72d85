"""Reads rows of a dataset for planning: some to measure, and texts to make a tokenizer from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs

from cosmos_core.config.job import Job
from cosmos_core.config.schema import Recipe
from cosmos_core.errors import DataError
from cosmos_core.protocols import Dataset, Model, Split
from cosmos_core.protocols.reward import Vetting
from cosmos_core.run.planning.parts import Measured
from cosmos_core.types import Prompt

_MEASURED_PROMPTS: Final = 200
_VETTED: Final = 4
"""Demonstrations that the model is shown, fit or not: a video takes a while to read."""
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model", "tekken.json")


def look_at_rows(
    model: Model,
    dataset: Dataset,
    rewards: Sequence[Vetting],
    sizes: Mapping[Split, int],
    recipe: Recipe,
    *,
    imitates: bool,
    longest: int,
) -> Measured:
    """Look at some rows, spread over the train split; unusable ones are passed over, as in the run.

    Args:
        model: Encodes them.
        dataset: Has them.
        rewards: Those that vet train rows.
        sizes: Rows of each split.
        recipe: Limits lengths, and says how many held-out rows are evaluated.
        imitates: Whether demonstrations of train rows are learned.
        longest: Most units of a prompt of tokens that what follows it fits beside.
    """
    num_rows = sizes["train"]
    count = min(num_rows, _MEASURED_PROMPTS)
    num_heldout = min(recipe.evaluation.prompts, sizes["heldout"], _MEASURED_PROMPTS)
    num_to_vet = _VETTED if imitates else 0
    seen = _Seen(model=model, rewards=rewards, recipe=recipe, num_to_vet=num_to_vet, longest=longest)
    for index in range(count):
        seen.look_at(dataset, index * num_rows // count)
    return Measured(
        num_rows=count,
        num_demonstrations=seen.demonstrations,
        num_preferences=seen.preferences,
        shortest_prompt=min(seen.lengths, default=0),
        longest_prompt=max(seen.lengths, default=0),
        num_with_media=seen.with_media,
        num_heldout=num_heldout,
        num_heldout_demonstrations=sum(_has_demonstration(dataset, index) for index in range(num_heldout)),
        num_unusable=seen.unusable,
        fault=seen.fault,
        num_unfit=seen.unfit,
        num_too_long=seen.too_long,
        num_vetted=seen.vetted,
    )


@attrs.define(kw_only=True)
class _Seen:
    """Counts of the rows that were looked at."""

    model: Model
    rewards: Sequence[Vetting]
    recipe: Recipe
    num_to_vet: int
    longest: int
    lengths: list[int] = attrs.field(factory=list, init=False)
    demonstrations: int = attrs.field(default=0, init=False)
    preferences: int = attrs.field(default=0, init=False)
    with_media: int = attrs.field(default=0, init=False)
    vetted: int = attrs.field(default=0, init=False)
    unfit: int = attrs.field(default=0, init=False)
    too_long: int = attrs.field(default=0, init=False)
    unusable: int = attrs.field(default=0, init=False)
    fault: str = attrs.field(default="", init=False)

    def look_at(self, dataset: Dataset, row: int) -> None:
        try:
            prompt = dataset.row("train", row)
            payload = self.model.encode(prompt)
            self._vet(prompt)
        except DataError as error:
            self.unusable += 1
            self.fault = self.fault or str(error)
            return
        self.demonstrations += prompt.demonstration is not None
        self.preferences += prompt.demonstration is not None and prompt.rejected is not None
        self.with_media += bool(prompt.media)
        if "prompt" in payload.arrays:
            num_units = payload.arrays["prompt"].shape[0]
            if self.recipe.dataset.unfit(num_units)[0]:
                self.unfit += 1
            else:
                self.lengths.append(num_units)
                self.too_long += payload.kind == "tokens" and num_units > self.longest

    def _vet(self, prompt: Prompt) -> None:
        for reward in self.rewards:
            reward.vet(prompt)
        if self.num_to_vet and prompt.demonstration is not None and isinstance(self.model, Vetting):
            self.num_to_vet -= 1
            self.model.vet(prompt)
            self.vetted += 1


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
    """Texts of the train split to make a tokenizer from: prompts as they read, and demonstrations.

    Raises:
        DataError: No row is usable; some bad ones are passed over, as in the run.
    """
    num_read, fault = 0, ""
    for index in range(num_rows):
        try:
            prompt: Prompt = dataset.row("train", index)
        except DataError as error:
            fault = fault or str(error)
            continue
        num_read += 1
        if isinstance(prompt.text, str):
            yield prompt.text
        else:
            yield from (message.content for message in prompt.text)
        if prompt.demonstration is not None:
            yield prompt.demonstration
    if fault and not num_read:
        raise DataError(f"none of {num_rows} train rows can be used to make a tokenizer from; the first: {fault}")
