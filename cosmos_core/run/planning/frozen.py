"""Whether the frozen models of a recipe fit the policy: they evaluate the very sequences that it trains on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from cosmos_core.config.job import Job
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.plugins.roles import frozen_source, load_frozen
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Dataset, FrozenRole, Model, ModelCapabilities, ModelFacts
from cosmos_core.types import Payload, Prompt

_COMPARED_ROWS = 16


@attrs.frozen(kw_only=True)
class FrozenFacts:
    """What planning found of a frozen model.

    Attributes:
        facts: Of the model.
        misfit: How it encodes a row otherwise than the policy; empty if it encodes all that were tried alike.
        plugin: Name of its model plugin.
        capabilities: Of this plugin.
    """

    facts: ModelFacts
    misfit: str
    plugin: str
    capabilities: ModelCapabilities


def frozen_facts(
    job: Job, plugins: PluginSet, model: Model, dataset: Dataset, num_rows: int
) -> Mapping[FrozenRole, FrozenFacts]:
    """Load the frozen models, without weights, and compare how they encode some rows.

    Args:
        job: The run.
        plugins: Its plugins.
        model: The policy's.
        dataset: Its rows.
        num_rows: Of the train split.

    Raises:
        CosmosError: A frozen model cannot be made.
    """
    found: dict[FrozenRole, FrozenFacts] = {}
    for role in job.recipe.frozen:
        try:
            other = load_frozen(job, plugins, role)
            facts = other.facts()
        except ConfigError as error:
            # A model knows its own table only.
            raise ConfigError(f"{role}{str(error).removeprefix('model')}") from error
        source = frozen_source(job, role)
        config = job.recipe.frozen[role]
        # The policy's own model encodes as it does: there is nothing to compare.
        is_same = config.plugin is None and config.path is None and not config.options
        found[role] = FrozenFacts(
            facts=facts,
            misfit="" if is_same else next(_misfits(model, other, dataset, num_rows), ""),
            plugin=source.plugin,
            capabilities=plugins.provider("model", source.plugin).capabilities,
        )
    return found


def _misfits(model: Model, other: Model, dataset: Dataset, num_rows: int) -> Iterator[str]:
    count = min(num_rows, _COMPARED_ROWS)
    for index in range(count):
        row = index * num_rows // count
        try:
            prompt = dataset.row("train", row)
            encoded = _encoded(model, prompt)
        except DataError:
            # Unusable rows are told of where rows are measured.
            continue
        where = f"train row {row} ({_shown(prompt)})"
        try:
            pairs = zip(encoded, _encoded(other, prompt), strict=True)
        except DataError as error:
            yield f"{where}, which the policy encodes, is refused by it ({error})"
            continue
        for ours, theirs in pairs:
            for name in ours.arrays:
                if name not in theirs.arrays or not _is_alike(ours, theirs, name):
                    yield f"{where} has another {name!r} for it than for the policy"


def _encoded(model: Model, prompt: Prompt) -> list[Payload]:
    found = [model.encode(prompt)]
    if prompt.demonstration is not None:
        found.append(model.encode_demonstration(prompt))
    return found


def _is_alike(ours: Payload, theirs: Payload, name: str) -> bool:
    mine, other = ours.arrays[name], theirs.arrays[name]
    return (mine.dtype, mine.shape, bytes(mine.data)) == (other.dtype, other.shape, bytes(other.data))


def _shown(prompt: Prompt) -> str:
    text = prompt.text if isinstance(prompt.text, str) else " ".join(each.content for each in prompt.text)
    return f"{text!r:.60}"
