"""Images into a text decoder: the model's own forward makes its inputs, and is stopped where the decoder begins.

Whatever a vision-language model of transformers does with its images, its last act before the text is to call its
decoder with embeddings in which what is seen has taken the places of placeholder tokens. Those are taken, and the
packed row goes its own way from there.

Shape legend: R units of the row, U of this process's slice, K places of what is seen, D hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch

from cosmos_core.errors import PluginIncompatibleError
from cosmos_core.models.packing import EMBEDDINGS
from cosmos_core.models.parallel.collectives import split_dim

if TYPE_CHECKING:
    import torch.distributed as dist

MASK: Final = "visual_pos_masks"
DEEPER: Final = "deepstack_visual_embeds"
_OURS: Final = {EMBEDDINGS, "input_ids", "position_ids", "attention_mask"} | {
    *("past_key_values", "cache_position", "use_cache", "return_dict")
}
"""What decoders are called with that rows have their own of, or none."""


@attrs.frozen(kw_only=True, eq=False)
class DecoderInputs:
    """Embeddings of a whole row, of tokens and of what is seen, as a text decoder is called with them.

    At `places_K`, int64, each of `deeper_KD` is added behind one of its first layers (deepstack; arXiv 2406.04334).
    """

    embeddings_RD: torch.Tensor
    places_K: torch.Tensor
    deeper_KD: tuple[torch.Tensor, ...] = ()

    def part(self, bounds: tuple[int, int], sequence_group: dist.ProcessGroup | None) -> dict[str, Any]:
        """Keyword arguments of the decoder for this process's slice; `sequence_group` may split it between layers."""
        start, stop = bounds
        entered_UD = self.embeddings_RD[start:stop]
        if not self.deeper_KD:
            return {EMBEDDINGS: entered_UD[None]}
        here_k = ((self.places_K >= start) & (self.places_K < stop)).nonzero()[:, 0]
        places_k = self.places_K[here_k] - start
        deeper_kD = [feature[here_k].to(entered_UD.dtype) for feature in self.deeper_KD]
        is_seen_U = torch.zeros(len(entered_UD), dtype=torch.bool, device=entered_UD.device)
        is_seen_U[places_k] = True
        if sequence_group is not None:
            # Each process adds to its part of the sequence; the gradient of the tower is gathered from all parts.
            spread_UD = [torch.zeros_like(entered_UD).index_copy(0, places_k, deeper) for deeper in deeper_kD]
            deeper_kD = [split_dim(deeper, 0, sequence_group) for deeper in spread_UD]
            is_seen_U = torch.ones(len(deeper_kD[0]), dtype=torch.bool, device=entered_UD.device)
        return {EMBEDDINGS: entered_UD[None], MASK: is_seen_U[None], DEEPER: deeper_kD}


def decoder_inputs(
    module: Any,
    tokens_R: torch.Tensor,
    told_R: torch.Tensor,
    positions_R: torch.Tensor,
    media: Mapping[str, torch.Tensor],
) -> DecoderInputs:
    """Run a model, or its first stage, up to its text decoder.

    Args:
        module: The model.
        tokens_R: int64, which it embeds.
        told_R: int64, in which it looks for places: another token for each placeholder that stands for nothing, such as
            a sampled one.
        positions_R: int64 [..., R].
        media: What the model's forward takes of images, for all documents of the row.

    Raises:
        PluginIncompatibleError: It hands its decoder what the rest of a row would not carry along.
    """
    dtype = next(module.parameters()).dtype
    given = {name: value.to(dtype) if value.is_floating_point() else value for name, value in media.items()}
    reached: dict[str, Any] = {}

    def restore(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        ids_1R, *others = args
        return (torch.where(told_R != tokens_R, tokens_R, ids_1R), *others)

    def stop(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert not args, "transformers calls decoders by keyword"
        reached.update(kwargs)
        raise _Reached

    with (
        module.get_input_embeddings().register_forward_pre_hook(restore),
        module.get_decoder().register_forward_pre_hook(stop, with_kwargs=True),
        contextlib.suppress(_Reached),
    ):
        module.base_model(input_ids=told_R[None], position_ids=positions_R.unsqueeze(-2), use_cache=False, **given)
    return _taken(type(module).__name__, reached)


class _Reached(Exception):  # noqa: N818 - no error: the way out
    """The decoder was called."""


def _taken(name: str, reached: Mapping[str, Any]) -> DecoderInputs:
    given = {key: value for key, value in reached.items() if value is not None and value is not False}
    if beyond := sorted(given.keys() - _OURS - {MASK, DEEPER}):
        raise PluginIncompatibleError(
            f"{name} hands its text decoder {', '.join(beyond)} beside embeddings, which a packed row does not carry "
            "along; images need a model plugin of its own"
        )
    embeddings_RD, mask_1R = given[EMBEDDINGS][0], given.get(MASK)
    places_K = torch.zeros(0, dtype=torch.int64) if mask_1R is None else mask_1R[0].nonzero()[:, 0]
    return DecoderInputs(embeddings_RD=embeddings_RD, places_K=places_K, deeper_KD=tuple(given.get(DEEPER) or ()))
