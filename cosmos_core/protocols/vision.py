"""Prompts that show images or videos: how they enter a module, and how other implementations of its family take them.

Shape legend: P units of a prompt, N units of a forward, K of them of conditioned prompts, R whose logits are asked for,
A rotary axes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import attrs

from cosmos_core.protocols.model import MicroBatch
from cosmos_core.types import Message, Payload, Prompt

if TYPE_CHECKING:
    import torch


@attrs.frozen(kw_only=True, eq=False)
class Conditioning:
    """Inputs of a module for a prompt of P units, where its token ids do not say it all.

    Attributes:
        positions: int64 [P], or [A, P] with one for each of A rotary axes; on the CPU.
        next_position: Of the first generated unit, on every axis; that of each later one is one more.
        batch: What `VisionModel.enter` reads; an engine does not look inside.
    """

    positions: torch.Tensor
    next_position: int
    batch: MicroBatch


@attrs.frozen(kw_only=True, eq=False)
class VisionInputs:
    """Units of one forward, of any sequences, some of them units of conditioned prompts.

    Attributes:
        tokens_N: int64.
        positions: int64 [N], or [A, N].
        places_K: int64, ascending: which units enter with more than their token.
        features: What those enter with, [K, ...] each: rows of what `VisionModel.enter` gave.
        kept_R: int64, the units whose logits are asked for.
    """

    tokens_N: torch.Tensor
    positions: torch.Tensor
    places_K: torch.Tensor
    features: Mapping[str, torch.Tensor]
    kept_R: torch.Tensor


@attrs.frozen(kw_only=True, eq=False)
class Shown:
    """An image or a video of a prompt, as the Hugging Face forward of its family takes it.

    Attributes:
        modality: What it is.
        start: Its first unit in the prompt: one that is seen, or a word where the family begins to look for it.
        is_seen_U: bool [U], of the units from there to the last that is seen: which enter as what the tower makes of
            it, in order; the others are words of it, such as times.
        inputs: Keyword arguments of that forward for this one, on the CPU; those of several are concatenated (dim 0).
    """

    modality: Literal["image", "video"]
    start: int
    is_seen_U: torch.Tensor
    inputs: Mapping[str, torch.Tensor]


@runtime_checkable
class VisionModel(Protocol):
    """A model whose prompts may show images or videos. Optional, beside `Model`.

    Engines that run its modules themselves let prompts enter in pieces, among units of other sequences, and once for
    many samples. Those that run another implementation of the family, its tower included, ask what is `shown`.
    """

    def condition(self, prompt: Payload) -> Conditioning | None:
        """Lay a prompt out; None where its token ids say it all. Needs no weights.

        Raises:
            DataError: The arrays of the payload do not fit its prompt.
        """

    def enter(self, module: torch.nn.Module, conditioning: Conditioning) -> Mapping[str, torch.Tensor]:
        """Compute what each unit of the prompt enters with under the weights of the module (its tower runs here).

        Returns:
            [P, ...] each, on the module's device, by names that only the model reads.
        """

    def evaluate(self, module: torch.nn.Module, inputs: VisionInputs) -> torch.Tensor:
        """Logits [R, V], before the temperature, of a forward that attends as the engine has it attend."""

    @property
    def shown(self) -> Callable[[Payload], Sequence[Shown]] | None:
        """A method that gives the images and videos of a prompt, in its order; None where it cannot tell.

        It gives none where the token ids of the prompt say it all, and needs no weights; positions are those of
        `condition`. It raises `DataError` where the arrays of the payload do not fit the prompt.
        """


@runtime_checkable
class DialogueVision(Protocol):
    """A model whose dialogues may show images in any turn. Optional, beside `VisionModel` and `MultiTurnModel`.

    `condition` and `pack` then take payloads with `kinds` (see `cosmos_core.types.Payload`).
    """

    def encode_seen_turns(self, prompt: Prompt, written: Sequence[int], turns: Sequence[Message]) -> Payload:
        """Encode turns as `MultiTurnModel.encode_turns` does, as the `prompt` of a payload with arrays of what is seen.

        Raises:
            DataError: The turns cannot be encoded, or their images cannot be read.
        """

    def join(self, parts: Sequence[Payload]) -> Payload:
        """One prompt of the prompts of parts that follow one another, with what they show.

        A part without arrays for it shows nothing, whatever its ids are: so a model's own turns are text.
        """
