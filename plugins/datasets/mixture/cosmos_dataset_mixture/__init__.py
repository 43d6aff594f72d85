"""Several datasets mixed by weight."""

from cosmos_dataset_mixture.dataset import Mixture
from cosmos_dataset_mixture.options import MixtureOptions, Part

__all__ = ["Mixture", "MixtureOptions", "Part"]
