"""Positions over several rotary axes (M-RoPE), as a vision-language model of transformers counts them itself.

Source: arXiv:2409.12191, section 2.1.

Shape legend: U units of a sequence, A axes.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from transformers import MODEL_MAPPING, PretrainedConfig

from cosmos_core.errors import DataError
from cosmos_core.models.weights.loading import LIBRARY_ERRORS, first_line


class OwnPositions:
    """The positions that a model gives the units of a sequence with images.

    Args:
        model_class: The model of transformers that counts them.
        config: Of the whole model.
    """

    def __init__(self, model_class: Any, config: PretrainedConfig) -> None:
        # An instance that can count positions, which reads nothing but the config.
        self._model = model_class.__new__(model_class)
        torch.nn.Module.__init__(self._model)
        self._model.config = config
        self._takes = frozenset(inspect.signature(model_class.get_rope_index).parameters)

    @staticmethod
    def of_config(config: PretrainedConfig) -> OwnPositions | None:
        """Of the model of a config; None where units have one position each, in order."""
        model_class = MODEL_MAPPING.get(type(config), None)
        return OwnPositions(model_class, config) if hasattr(model_class, "get_rope_index") else None

    @functools.cached_property
    def num_axes(self) -> int:
        """A."""
        none = torch.zeros(1, dtype=torch.int64)
        return len(self.of(none, none))

    def of(self, tokens_U: torch.Tensor, kinds_U: torch.Tensor, **given: Any) -> torch.Tensor:
        """int64 [A, U].

        Args:
            tokens_U: int64, the sequence.
            kinds_U: int64, 0 for text, 1 for images, 2 for videos.
            given: What the model takes of the images and videos; what it has no use for here is left out.

        Raises:
            DataError: These do not fit the kinds.
        """
        known = {name: value for name, value in given.items() if name in self._takes}
        try:
            positions_A1U, _ = self._model.get_rope_index(tokens_U[None], mm_token_type_ids=kinds_U[None], **known)
        except (*LIBRARY_ERRORS, StopIteration) as error:
            raise DataError(f"what is seen does not fit its places in the sequence: {first_line(error)}") from error
        positions_AU: torch.Tensor = positions_A1U[:, 0]
        return positions_AU
