"""Bugs, one at a time, in all that the controller decides; the oracles of the simulation must find them.

They were written down before any seed was tried. `seeds.json` has, for each that a search found, the first seed that
shows it: `python -m tests.simulation plants --write`.
"""

from __future__ import annotations

from . import going_on, membership, messages, prompts, turns, weights

__all__ = ["PLANTS"]

PLANTS = (*messages.PLANTS, *prompts.PLANTS, *membership.PLANTS, *weights.PLANTS, *going_on.PLANTS, *turns.PLANTS)
