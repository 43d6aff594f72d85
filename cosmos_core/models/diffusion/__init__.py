"""Building blocks for plugins of world models: `DiffusionModel` and `DiffusionOptions` are what a family subclasses."""

from cosmos_core.models.diffusion.arrays import payload_of, tensor_of, with_tensors
from cosmos_core.models.diffusion.context import TokenSlices, spread_blocks
from cosmos_core.models.diffusion.family import Part
from cosmos_core.models.diffusion.model import DiffusionModel
from cosmos_core.models.diffusion.options import DiffusionOptions
from cosmos_core.models.diffusion.rows import GIVEN, IS_GIVEN, TEXT
from cosmos_core.protocols.frozen import DivergenceKind

DIVERGENCES: frozenset[DivergenceKind] = frozenset({"forward-kl", "reverse-kl"})
"""What `DiffusionModel.decide` computes: of normals with one variance both have a closed form, and are the same."""

__all__ = [
    "DIVERGENCES",
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
