"""Plans a recipe with the plugin under test; all other parts give whatever they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cosmos_core.config.job import stages
from cosmos_core.config.schema import AlgorithmConfig, DatasetConfig, ModelConfig, Recipe, RunConfig
from cosmos_core.protocols import (
    AlgorithmCapabilities,
    DatasetCapabilities,
    EngineCapabilities,
    ModelCapabilities,
    ModelFacts,
    RewardCapabilities,
)
from cosmos_core.run.planning.checks import problems
from cosmos_core.run.planning.parts import Measured, Parts

_FACTS: Final = ModelFacts(
    architecture="Any",
    num_parameters=1,
    num_layers=1,
    hidden_size=1,
    vocab_size=0,
    tokenizer_size=0,
    context_length=1 << 20,
    stop_ids=frozenset(),
    pad_id=0,
)


def planned(configured: Mapping[str, Any], **declared: Any) -> list[str]:
    """Problems of a recipe of one step with these parts, whose plugins have these capabilities, by kind."""
    recipe = Recipe(
        **{
            "run": RunConfig(name="conformance", steps=1),
            "model": ModelConfig(config={}),
            "algorithm": AlgorithmConfig(plugin="any"),
            "dataset": DatasetConfig(plugin="any"),
            **configured,
        }
    )
    declared.setdefault("dataset", DatasetCapabilities())
    engine = declared.setdefault("engine", EngineCapabilities())
    algorithm, reward = declared.pop("algorithm", AlgorithmCapabilities()), declared.pop("reward", RewardCapabilities())
    parts = Parts(
        model=ModelCapabilities(payload_kinds=engine.payload_kinds),
        facts=_FACTS,
        stages=[(stage, algorithm) for stage in stages(recipe)],
        rewards=[reward for _ in recipe.reward],
        num_train_rows=10,
        num_heldout_rows=10,
        measured=Measured(num_rows=10, num_demonstrations=10, num_preferences=10, shortest_prompt=4, longest_prompt=8),
        **declared,
    )
    return problems(recipe, parts)
