"""What planning says of a recipe with the environment under test."""

from __future__ import annotations

from cosmos_core.config.schema import AlgorithmConfig, DatasetConfig, EnvironmentConfig, ModelConfig, Recipe, RunConfig
from cosmos_core.protocols import (
    AlgorithmCapabilities,
    DatasetCapabilities,
    EngineCapabilities,
    EnvironmentCapabilities,
    RewardCapabilities,
)
from cosmos_core.testing.conformance.planning import planned


def refusals(plugin: str, capabilities: EnvironmentCapabilities, *, weight: float) -> list[str]:
    """Why planning refuses the environment with this weight."""
    recipe = Recipe(
        run=RunConfig(name="conformance", steps=1),
        model=ModelConfig(config={}),
        algorithm=AlgorithmConfig(plugin="any"),
        dataset=DatasetConfig(plugin="any"),
        environment=EnvironmentConfig(plugin=plugin, weight=weight),
    )
    found = planned(
        recipe,
        algorithm=AlgorithmCapabilities(),
        reward=RewardCapabilities(),
        engine=EngineCapabilities(),
        dataset=DatasetCapabilities(),
        environment=capabilities,
    )
    return [problem for problem in found if problem.startswith("environment.")]
