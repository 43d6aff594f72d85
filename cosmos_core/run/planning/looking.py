"""What planning reads of a dataset: some rows, and texts to make a tokenizer from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from cosmos_core.config.job import Job
from cosmos_core.config.schema import Recipe
from cosmos_core.errors import DataError
from cosmos_core.protocols import Dataset, Model, Split, Vetting
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
) -> Measured:
    """Look at some rows, spread over the train split; unusable ones are passed over, as in the run.

    Args:
        model: Encodes them.
        dataset: Has them.
        rewards: Those that vet train rows.
        sizes: Rows of each split.
        recipe: Limits lengths, and says how many held-out rows are evaluated.
        imitates: Whether demonstrations of train rows are learned.
    """
    num_rows = sizes["train"]
    count = min(num_rows, _MEASURED_PROMPTS)
    num_heldout = min(recipe.evaluation.prompts, sizes["heldout"], _MEASURED_PROMPTS)
    lengths: list[int] = []
    faults: list[str] = []
    demonstrations = preferences = shown = unfit = vetted = 0
    unvetted = _VETTED if imitates and isinstance(model, Vetting) else 0
    for index in range(count):
        try:
            prompt = dataset.row("train", index * num_rows // count)
            payload = model.encode(prompt)
            for reward in rewards:
                reward.vet(prompt)
            if unvetted and prompt.demonstration is not None and isinstance(model, Vetting):
                unvetted -= 1
                model.vet(prompt)
                vetted += 1
        except DataError as error:
            faults.append(str(error))
            continue
        demonstrations += prompt.demonstration is not None
        preferences += prompt.demonstration is not None and prompt.rejected is not None
        shown += bool(prompt.media)
        if "prompt" in payload.arrays:
            num_units = payload.arrays["prompt"].shape[0]
            if recipe.dataset.unfit(num_units)[0]:
                unfit += 1
            else:
                lengths.append(num_units)
    return Measured(
        num_rows=count,
        num_demonstrations=demonstrations,
        num_preferences=preferences,
        shortest_prompt=min(lengths, default=0),
        longest_prompt=max(lengths, default=0),
        num_with_media=shown,
        num_heldout=num_heldout,
        num_heldout_demonstrations=sum(_has_demonstration(dataset, index) for index in range(num_heldout)),
        num_unusable=len(faults),
        fault=next(iter(faults), ""),
        num_unfit=unfit,
        num_vetted=vetted,
    )


def _has_demonstration(dataset: Dataset, index: int) -> bool:
    try:
        return dataset.row("heldout", index).demonstration is not None
    except DataError:
        return False


def lacks_tokenizer(job: Job) -> bool:
    """Whether the recipe's tokenizer is to be made: always, or where the checkpoint is a folder without one."""
    model = job.recipe.model
    assert model.tokenizer is not None
    if model.path is None or not model.tokenizer.if_missing:
        return True
    folder = job.recipe_directory / Path(model.path).expanduser()
    return folder.is_dir() and not any((folder / name).is_file() for name in _TOKENIZER_FILES)


def texts(dataset: Dataset, num_rows: int) -> Iterator[str]:
    """Texts of the train split to make a tokenizer from: prompts as they read, and demonstrations."""
    for index in range(num_rows):
        prompt: Prompt = dataset.row("train", index)
        if isinstance(prompt.text, str):
            yield prompt.text
        else:
            yield from (message.content for message in prompt.text)
        if prompt.demonstration is not None:
            yield prompt.demonstration
