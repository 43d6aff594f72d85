"""Features that the vision tower makes of a row's patches, and their places in the text backbone's input.

Shape legend: U units of this process's slice of a packed row, K visual tokens of the row, D hidden size, M patches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch

from cosmos_core.models.parallel.collectives import split_dim
from cosmos_model_qwen_vl.patches import Patcher
from cosmos_model_qwen_vl.row import GRIDS, PATCHES, PLACES

if TYPE_CHECKING:
    import torch.distributed as dist


@attrs.frozen(kw_only=True, eq=False)
class Features:
    """Features of the images and videos of a row.

    Attributes:
        places_K: int64, in the row.
        first_KD: Takes the places of the placeholders' embeddings.
        deeper_KD: Added behind the first layers of the backbone, one for each (deepstack; arXiv 2406.04334).
    """

    places_K: torch.Tensor
    first_KD: torch.Tensor
    deeper_KD: tuple[torch.Tensor, ...]

    def enter(
        self, embeddings_UD: torch.Tensor, bounds: tuple[int, int], sequence_group: dist.ProcessGroup | None
    ) -> dict[str, Any]:
        """Keyword arguments of the backbone.

        Args:
            embeddings_UD: Of the slice's tokens.
            bounds: Of the slice in the row.
            sequence_group: The processes that split the slice between the backbone's layers, if any do.
        """
        start, stop = bounds
        here_k = ((self.places_K >= start) & (self.places_K < stop)).nonzero()[:, 0]
        places_k = self.places_K[here_k] - start
        entered_UD = embeddings_UD.index_copy(0, places_k, self.first_KD[here_k].to(embeddings_UD.dtype))
        if not self.deeper_KD:
            return {"inputs_embeds": entered_UD[None]}
        deeper_kD = [feature[here_k].to(embeddings_UD.dtype) for feature in self.deeper_KD]
        is_seen_U = torch.zeros(len(embeddings_UD), dtype=torch.bool, device=embeddings_UD.device)
        is_seen_U[places_k] = True
        if sequence_group is not None:
            # Each process adds to its part of the sequence; the gradient of the tower is gathered from all parts.
            spread_UD = [torch.zeros_like(embeddings_UD).index_copy(0, places_k, deeper) for deeper in deeper_kD]
            deeper_kD = [split_dim(deeper, 0, sequence_group) for deeper in spread_UD]
            is_seen_U = torch.ones(len(deeper_kD[0]), dtype=torch.bool, device=embeddings_UD.device)
        return {
            "inputs_embeds": entered_UD[None],
            "visual_pos_masks": is_seen_U[None],
            "deepstack_visual_embeds": deeper_kD,
        }


def look(module: Any, inputs: Mapping[str, torch.Tensor], patcher: Patcher) -> Features | None:
    """Run the vision tower on all images and videos of a row, in one call.

    Args:
        module: The model, or its first stage.
        inputs: Of the micro-batch, on the module's device.
        patcher: Normalises patches.

    Returns:
        None where nothing was shown.
    """
    # Text that is only evaluated (the check of a new model) comes without patches.
    if PATCHES not in inputs or not len(inputs[PATCHES]):
        return None
    output = module.base_model.get_image_features(patcher.normalise(inputs[PATCHES]), inputs[GRIDS], return_dict=True)
    first_KD = torch.cat(tuple(output.pooler_output))
    # Of all pictures together in older releases of transformers, of each in newer ones.
    features = getattr(output, "deepstack_features", None) or ()
    deeper = tuple(each if isinstance(each, torch.Tensor) else torch.cat(tuple(each)) for each in features)
    return Features(places_K=inputs[PLACES], first_KD=first_KD, deeper_KD=deeper)
