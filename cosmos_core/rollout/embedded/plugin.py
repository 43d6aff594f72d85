"""The entry point `embedded`: the engine's options and capabilities, without importing torch."""

from __future__ import annotations

from cosmos_core.protocols import EngineCapabilities, EngineContext, Provider, RolloutEngine, hookimpl
from cosmos_core.protocols.quantization import FORMATS
from cosmos_core.rollout.embedded.options import EmbeddedOptions, preflight


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
        capabilities=EngineCapabilities(
            media=True,
            records=True,
            prefix_sharing=True,
            cache_page=256,
            replays_steps=True,
            sleeps=True,
            quantizations=frozenset(FORMATS.keys()),
        ),
        preflight=preflight,
    )
