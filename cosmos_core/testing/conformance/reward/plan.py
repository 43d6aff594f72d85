"""What planning says of a recipe with the reward under test."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from cosmos_core.config.schema import AlgorithmConfig, DatasetConfig, ModelConfig, Recipe, RewardConfig, RunConfig
from cosmos_core.config.stages import stages
from cosmos_core.protocols import (
    AlgorithmCapabilities,
    DatasetCapabilities,
    EngineCapabilities,
    ModelCapabilities,
    ModelFacts,
    RewardCapabilities,
)
from cosmos_core.run.checks import Measured, Parts, problems

_FACTS = ModelFacts(
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


def refusals(plugin: str, capabilities: RewardCapabilities, made: AbstractSet[str]) -> list[str]:
    """Why planning refuses the reward beside an engine that makes payloads of the kinds `made`."""
    recipe = Recipe(
        run=RunConfig(name="conformance", steps=1),
        model=ModelConfig(config={}),
        algorithm=AlgorithmConfig(plugin="any"),
        dataset=DatasetConfig(plugin="any"),
        reward=(RewardConfig(plugin=plugin),),
    )
    kinds = frozenset(made)
    parts = Parts(
        model=ModelCapabilities(payload_kinds=kinds),
        facts=_FACTS,
        dataset=DatasetCapabilities(),
        stages=[(stage, AlgorithmCapabilities(payload_kinds=kinds)) for stage in stages(recipe)],
        rewards=[capabilities],
        engine=EngineCapabilities(payload_kinds=kinds),
        num_train_rows=1,
        num_heldout_rows=1,
        measured=Measured(num_rows=1, num_demonstrations=0, shortest_prompt=1, longest_prompt=1),
    )
    return [problem for problem in problems(recipe, parts) if f"reward {plugin!r}" in problem]
