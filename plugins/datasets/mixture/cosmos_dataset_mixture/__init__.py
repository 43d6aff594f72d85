"""Several datasets mixed by weight."""

from cosmos_dataset_mixture.options import MixtureOptions, Part
from cosmos_dataset_mixture.plugin import Mixture

__all__ = ["Mixture", "MixtureOptions", "Part"]
