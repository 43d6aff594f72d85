"""Group-relative policy optimisation: GRPO, Dr. GRPO and DAPO, one module each, on composable parts."""

from cosmos_algorithm_grpo.dapo import Dapo, DapoOptions
from cosmos_algorithm_grpo.dr_grpo import DrGrpo, DrGrpoOptions
from cosmos_algorithm_grpo.grpo import Grpo, GrpoOptions

__all__ = ["Dapo", "DapoOptions", "DrGrpo", "DrGrpoOptions", "Grpo", "GrpoOptions"]
