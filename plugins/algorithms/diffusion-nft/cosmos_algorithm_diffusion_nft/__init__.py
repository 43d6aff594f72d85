"""DiffusionNFT: what is good and what is bad of the policy's own samples, learned on the forward process."""

from cosmos_algorithm_diffusion_nft.objective import DiffusionNft
from cosmos_algorithm_diffusion_nft.options import DiffusionNftOptions

__all__ = ["DiffusionNft", "DiffusionNftOptions"]
