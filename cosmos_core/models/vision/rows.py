"""Images beside tokens: in payloads of the kind `tokens`, in packed rows, and in positions (M-RoPE).

A payload with images has more arrays: `kinds` int64 [P], 0 for text, and those of a processor, named `media.…`. A row
with images has `told` int64 [U], its tokens without placeholders that stand for nothing (a policy may sample one), and
the processor's arrays of all its documents, joined. Positions are counted by the model's own class of transformers.

Source of positions over several axes: arXiv:2409.12191, section 2.1.

Shape legend: U units of a packed row or a sequence, P units of a prompt, A axes.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs
import torch
from transformers import MODEL_MAPPING, PretrainedConfig

from cosmos_core.errors import DataError
from cosmos_core.models.packing import PAD_TOKEN
from cosmos_core.models.tokens import array_of, tokens_payload, values, view
from cosmos_core.models.vision.processor import Processed, join
from cosmos_core.models.weights.loading import LIBRARY_ERRORS, first_line
from cosmos_core.protocols import MicroBatch
from cosmos_core.types import Payload


class OwnPositions:
    """The positions that a model gives the units of a sequence with images."""

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
        """Positions int64 [A, U] of a sequence; its kinds are 0 for text, 1 for images, 2 for videos.

        Raises:
            DataError: What the model is given of the images and videos does not fit the kinds.
        """
        known = {name: value for name, value in given.items() if name in self._takes}
        try:
            positions_A1U, _ = self._model.get_rope_index(tokens_U[None], mm_token_type_ids=kinds_U[None], **known)
        except (*LIBRARY_ERRORS, StopIteration) as error:
            raise DataError(f"what is seen does not fit its places in the sequence: {first_line(error)}") from error
        positions_AU: torch.Tensor = positions_A1U[:, 0]
        return positions_AU


KINDS: Final = "kinds"
MEDIA: Final = "media."
TOLD: Final = "told"


def with_seen(seen: Processed, completion: Sequence[int] | None) -> Payload:
    """A payload of a prompt with images, and of its completion if there is one."""
    payload = tokens_payload(seen.ids, completion)
    arrays = {f"{MEDIA}{name}": array_of(array) for name, array in seen.arrays.items()}
    return attrs.evolve(payload, arrays={**payload.arrays, KINDS: array_of(seen.kinds), **arrays})


def shows(payload: Payload) -> bool:
    """Tell whether a payload has images."""
    return any(map(is_media, payload.arrays))


def is_media(name: str) -> bool:
    """Tell whether an array of a payload is of its images."""
    return name == KINDS or name.startswith(MEDIA)


def lay_out(
    batch: MicroBatch, members: Sequence[Payload], joins: Mapping[str, int], own_positions: OwnPositions | None
) -> MicroBatch:
    """The micro-batch of these payloads, some with images, with what its documents see.

    `joins` has the dim along which each array of the processor is joined; `own_positions` is None where there is one
    axis. A DataError says that a payload with images lacks an array, or they do not fit together.
    """
    lengths = batch.inputs["lengths"].tolist()
    tokens = torch.split(batch.inputs["tokens"], lengths)
    kinds = [torch.zeros_like(each_U) for each_U in tokens]
    shown = {number: _whole(payload, joins) for number, payload in enumerate(members) if shows(payload)}
    for number, payload in shown.items():
        prompt = values(payload, KINDS)[: lengths[number]]
        kinds[number][: len(prompt)] = torch.from_numpy(prompt.copy())
    inputs = {TOLD: _told(batch.inputs["tokens"], torch.cat(kinds))}
    if own_positions is not None:
        # What fills a row up sees nothing, as text.
        counted = [torch.arange(length).expand(own_positions.num_axes, -1) for length in lengths]
        for number, payload in shown.items():
            media = {
                name.removeprefix(MEDIA): torch.from_numpy(view(payload, name).copy())
                for name in payload.arrays
                if name.startswith(MEDIA)
            }
            counted[number] = own_positions.of(tokens[number], kinds[number], **media)
        inputs["positions"] = torch.cat(counted, dim=1)
    for name, dim in joins.items():
        arrays = [view(payload, f"{MEDIA}{name}") for payload in shown.values()]
        inputs[f"{MEDIA}{name}"] = torch.from_numpy(join(arrays, dim))
    return attrs.evolve(batch, inputs={**batch.inputs, **inputs})


def _whole(payload: Payload, joins: Mapping[str, int]) -> Payload:
    wanted = {KINDS, *(f"{MEDIA}{name}" for name in joins)}
    if lost := sorted(wanted - payload.arrays.keys()):
        raise DataError(f"a payload with images lacks {', '.join(lost)}; it has {', '.join(payload.arrays)}")
    sizes = [payload.arrays[name].shape for name in ("prompt", KINDS)]
    if sizes[0] != sizes[1]:
        raise DataError(f"a payload with images has {KINDS} {sizes[1]} of a prompt {sizes[0]}; give one for each unit")
    return payload


def _told(tokens_U: torch.Tensor, kinds_U: torch.Tensor) -> torch.Tensor:
    placeholders = set(tokens_U[kinds_U != 0].tolist())
    other = next(token for token in itertools.count(PAD_TOKEN) if token not in placeholders)
    is_placeholder_U = torch.isin(tokens_U, torch.tensor(sorted(placeholders)))
    return tokens_U.masked_fill(is_placeholder_U & (kinds_U == 0), other)
