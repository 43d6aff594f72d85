"""Proximal policy optimisation: a critic estimates what each decision is worth."""

from cosmos_algorithm_ppo.gae import generalised_advantages
from cosmos_algorithm_ppo.plugin import Ppo, PpoOptions

__all__ = ["Ppo", "PpoOptions", "generalised_advantages"]
