"""The entry point `vllm`."""

from __future__ import annotations

from cosmos_core.protocols import EngineCapabilities, EngineContext, Provider, RolloutEngine, hookimpl
from cosmos_core.protocols.quantization import FORMATS
from cosmos_engine_vllm.options import VllmOptions
from cosmos_engine_vllm.preflight import preflight


def _create(options: VllmOptions, context: EngineContext) -> RolloutEngine:
    # Imported here so that planning and listing plugins need no torch.
    from cosmos_engine_vllm.engine import VllmEngine  # noqa: PLC0415

    return VllmEngine(options, context)


@hookimpl
def cosmos_engine() -> Provider[RolloutEngine]:
    """Provide the vLLM engine.

    Samples share whole blocks of a prompt, not all of it, so `prefix_sharing` is not declared. On a GPU it draws for
    whole batches unless its option `seeds` says otherwise, so `seeded` is not either.
    """
    return Provider(
        create=_create,
        options=VllmOptions,
        capabilities=EngineCapabilities(
            media=True,
            quantizations=frozenset(FORMATS.keys()),
            mesh_axes=frozenset({"tp"}),
            only_alone=frozenset({"media"}),
            compresses_cache=True,
            sleeps=True,
            seeded=False,
        ),
        preflight=preflight,
    )
