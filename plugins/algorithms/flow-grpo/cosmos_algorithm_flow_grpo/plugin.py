"""The entry point `flow-grpo`."""

from __future__ import annotations

from cosmos_algorithm_flow_grpo.objective import FlowGrpo
from cosmos_algorithm_flow_grpo.options import FlowGrpoOptions
from cosmos_core.protocols import Algorithm, AlgorithmCapabilities, Provider, hookimpl


@hookimpl
def cosmos_algorithm() -> Provider[Algorithm]:
    """Provide FlowGRPO."""
    capabilities = AlgorithmCapabilities(payload_kinds=frozenset({"latents"}), min_group_size=2)
    return Provider(create=FlowGrpo, options=FlowGrpoOptions, capabilities=capabilities)
