"""Options of `wan`: those of every world model."""

from __future__ import annotations

import attrs

from cosmos_core.models.diffusion import DiffusionOptions


@attrs.frozen(kw_only=True)
class WanOptions(DiffusionOptions):
    """The making of conditionings from rows, and the learning of demonstrations."""
