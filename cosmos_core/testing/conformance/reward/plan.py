"""What planning says of a recipe with the reward under test."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from cosmos_core.config.schema import AlgorithmConfig, DatasetConfig, ModelConfig, Recipe, RewardConfig, RunConfig
from cosmos_core.protocols import AlgorithmCapabilities, DatasetCapabilities, EngineCapabilities, RewardCapabilities
from cosmos_core.testing.conformance.planning import planned


def refusals(plugin: str, capabilities: RewardCapabilities, made: AbstractSet[str]) -> list[str]:
    """Why planning refuses the reward beside an engine that makes payloads of the kinds `made`.

    Payloads of kind `media` are what an engine of latents renders.
    """
    recipe = Recipe(
        run=RunConfig(name="conformance", steps=1),
        model=ModelConfig(config={}),
        algorithm=AlgorithmConfig(plugin="any"),
        dataset=DatasetConfig(plugin="any"),
        reward=(RewardConfig(plugin=plugin),),
    )
    kinds = frozenset(kind if kind != "media" else "latents" for kind in made)
    found = planned(
        recipe,
        algorithm=AlgorithmCapabilities(payload_kinds=kinds),
        reward=capabilities,
        engine=EngineCapabilities(payload_kinds=kinds, renders="media" in made),
        dataset=DatasetCapabilities(),
    )
    return [problem for problem in found if f"reward {plugin!r}" in problem]
