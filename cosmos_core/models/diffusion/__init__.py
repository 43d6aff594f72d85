"""Building blocks for plugins of world models: `DiffusionModel` and `DiffusionOptions` are what a family subclasses."""

from cosmos_core.models.diffusion.arrays import payload_of, tensor_of, with_tensors
from cosmos_core.models.diffusion.context import TokenSlices, spread_blocks
from cosmos_core.models.diffusion.family import Part
from cosmos_core.models.diffusion.model import DiffusionModel
from cosmos_core.models.diffusion.options import DiffusionOptions
from cosmos_core.models.diffusion.rows import GIVEN, IS_GIVEN, TEXT
from cosmos_core.protocols import ModelCapabilities

CAPABILITIES = ModelCapabilities(
    payload_kinds=frozenset({"latents"}),
    mesh_axes=frozenset({"dp_replicate", "dp_shard", "cp"}),
    # Of normals with one variance both have a closed form, and are the same.
    divergences=frozenset({"forward-kl", "reverse-kl"}),
    blends=True,
)
"""Those of every `DiffusionModel`."""

__all__ = [
    "CAPABILITIES",
    "GIVEN",
    "IS_GIVEN",
    "TEXT",
    "DiffusionModel",
    "DiffusionOptions",
    "Part",
    "TokenSlices",
    "payload_of",
    "spread_blocks",
    "tensor_of",
    "with_tensors",
]
