"""Options of the embedded engine."""

from __future__ import annotations

import attrs

from cosmos_core.config.schema import POSITIVE, option


@attrs.frozen(kw_only=True)
class EmbeddedOptions:
    """Options of the embedded engine."""

    prefill_units: int = option(
        2048,
        help="Prompt units processed between two decoded units, at most; longer prompts go in parts.",
        validator=POSITIVE,
    )
    cache_step: int = option(
        32, help="The KV cache grows and shrinks by this many units per sequence.", validator=POSITIVE
    )
    verify: bool = option(
        True, help="Whether to check at start that the model decodes to the same log-probs as its own forward."
    )
