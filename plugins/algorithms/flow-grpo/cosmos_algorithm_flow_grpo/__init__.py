"""FlowGRPO: group-relative policy optimisation of denoising steps."""

from cosmos_algorithm_flow_grpo.objective import FlowGrpo
from cosmos_algorithm_flow_grpo.options import FlowGrpoOptions

__all__ = ["FlowGrpo", "FlowGrpoOptions"]
