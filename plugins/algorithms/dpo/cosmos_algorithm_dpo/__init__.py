"""Learning from pairs of completions, one preferred to the other, against a reference model."""

from cosmos_algorithm_dpo.preference import Margin, PreferenceObjective, Slope

__all__ = ["Margin", "PreferenceObjective", "Slope"]
