"""The entry point `diffusion-nft`."""

from __future__ import annotations

from cosmos_algorithm_diffusion_nft.objective import DiffusionNft
from cosmos_algorithm_diffusion_nft.options import DiffusionNftOptions
from cosmos_core.protocols import Algorithm, AlgorithmCapabilities, Provider, hookimpl


@hookimpl
def cosmos_algorithm() -> Provider[Algorithm]:
    """Provide DiffusionNFT."""
    return Provider(
        create=DiffusionNft,
        options=DiffusionNftOptions,
        capabilities=AlgorithmCapabilities(
            payload_kinds=frozenset({"latents"}),
            decisions=frozenset({"regressions"}),
            min_group_size=2,
            logprob_semantics=frozenset({"processed", "raw"}),
        ),
    )
