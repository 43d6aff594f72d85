"""The embedded engine as a plugin, and its options."""

from __future__ import annotations

import attrs

from cosmos_core.config.schema import POSITIVE, option
from cosmos_core.protocols import EngineCapabilities, EngineContext, Provider, RolloutEngine, hookimpl


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


def _create(options: EmbeddedOptions, context: EngineContext) -> RolloutEngine:
    # Imported here so that planning and listing plugins need no torch.
    from cosmos_core.rollout.embedded.engine import EmbeddedEngine  # noqa: PLC0415

    return EmbeddedEngine(options, context)


@hookimpl
def cosmos_engine() -> Provider[RolloutEngine]:
    """Provide the embedded engine."""
    return Provider(
        create=_create,
        options=EmbeddedOptions,
        capabilities=EngineCapabilities(prefix_sharing=True),
    )
