"""DDRL: reinforcement learning of denoising steps, held near data by the diffusion loss of demonstrations."""

from cosmos_algorithm_ddrl.objective import Ddrl
from cosmos_algorithm_ddrl.options import DdrlOptions

__all__ = ["Ddrl", "DdrlOptions"]
