"""The entry point `ddrl`."""

from __future__ import annotations

from cosmos_algorithm_ddrl.objective import Ddrl
from cosmos_algorithm_ddrl.options import DdrlOptions
from cosmos_core.protocols import Algorithm, AlgorithmCapabilities, Provider, hookimpl


@hookimpl
def cosmos_algorithm() -> Provider[Algorithm]:
    """Provide DDRL."""
    capabilities = AlgorithmCapabilities(payload_kinds=frozenset({"latents"}), min_group_size=2)
    return Provider(create=Ddrl, options=DdrlOptions, capabilities=capabilities)
