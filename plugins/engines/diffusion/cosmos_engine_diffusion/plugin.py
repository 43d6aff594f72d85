"""The entry point `diffusion`: the engine's options and capabilities, without importing torch."""

from __future__ import annotations

from cosmos_core.protocols import EngineCapabilities, EngineContext, Provider, RolloutEngine, hookimpl
from cosmos_engine_diffusion.options import DiffusionOptions
from cosmos_engine_diffusion.preflight import preflight


def _create(options: DiffusionOptions, context: EngineContext) -> RolloutEngine:
    # Imported here so that planning and listing plugins needs no torch.
    from cosmos_engine_diffusion.engine import DiffusionEngine  # noqa: PLC0415

    return DiffusionEngine(options, context)


@hookimpl
def cosmos_engine() -> Provider[RolloutEngine]:
    """Provide the diffusion engine."""
    capabilities = EngineCapabilities(payload_kinds=frozenset({"latents"}), media=True, renders=True, sleeps=True)
    return Provider(create=_create, options=DiffusionOptions, capabilities=capabilities, preflight=preflight)
