"""From the tensors of a checkpoint to those of a model: renamed, or joined and split, as transformers does it.

Each tensor of the model is made of its own sources alone, so that a process can make what it holds, piece by piece.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs
import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    SkipParameters,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from cosmos_core.errors import CheckpointError
from cosmos_core.models.weights.loading import LIBRARY_ERRORS, first_line

CONVERSION_ERRORS: Final = (*LIBRARY_ERRORS, SkipParameters)


@attrs.frozen(kw_only=True, eq=False)
class Recipe:
    """How some tensors of the model are made.

    Attributes:
        name: The first of them.
        sources: Names in the checkpoint, in order, each with the pattern of the converter that it matches.
        converter: Joins and splits; None where the one source is the tensor.
    """

    name: str
    sources: tuple[tuple[str, str], ...]
    converter: WeightConverter | None

    @property
    def num_merged(self) -> int:
        """How many modules (experts) are stacked first, hence can be made one by one; 0 if none are."""
        operation = self.converter.operations[0] if self.converter is not None else None
        if not isinstance(operation, MergeModulelist) or operation.dim != 0:
            return 0
        counts = {pattern: 0 for _, pattern in self.sources}
        for _, pattern in self.sources:
            counts[pattern] += 1
        return next(iter(counts.values())) if len(set(counts.values())) == 1 else 0

    def only(self, first: int, last: int) -> Recipe:
        """The same of some of the merged modules."""
        kept: dict[str, list[str]] = {}
        for name, pattern in self.sources:
            kept.setdefault(pattern, []).append(name)
        sources = tuple((name, pattern) for pattern, names in kept.items() for name in names[first:last])
        return attrs.evolve(self, sources=sources)

    def make(self, module: PreTrainedModel, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of the model, by name.

        Args:
            module: The model, for its config.
            read: Gives a tensor of the checkpoint.

        Raises:
            CheckpointError: The sources do not fit together.
        """
        if self.converter is None:
            return {self.name: read(self.sources[0][0])}
        converter = copy.deepcopy(self.converter)
        for name, pattern in self.sources:
            converter.add_tensor(self.name, name, pattern, read(name))
        try:
            made: Mapping[str, Any] = converter.convert(self.name, model=module, config=module.config)
        except CONVERSION_ERRORS as error:
            raise CheckpointError(
                f"{self.name} cannot be made of {self.sources[0][0]} …: {first_line(error)}"
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def recipes(module: PreTrainedModel, names: Sequence[str]) -> list[Recipe]:
    """How the tensors of a model are made of those of a checkpoint; what the model has no use for is left out.

    Args:
        module: The whole model; where its tensors are does not matter.
        names: Names in the checkpoint.
    """
    mapping = get_model_conversion_mapping(module)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    wanted = module.state_dict()
    prefix = module.base_model_prefix
    sources: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = rename_source_key(name, [], [], prefix, wanted)
        if target in wanted:
            sources.setdefault(target, []).append((name, pattern or ""))
    return [
        Recipe(name=target, sources=tuple(listed), converter=by_pattern.get(listed[0][1]))
        for target, listed in sources.items()
    ]
