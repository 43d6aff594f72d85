"""Plans a recipe with the algorithm under test; all other parts give whatever they are asked for."""

from __future__ import annotations

import itertools
from typing import get_args

import attrs

from cosmos_core.config.job import stages
from cosmos_core.config.schema import Recipe
from cosmos_core.config.structure import structure
from cosmos_core.protocols import (
    AlgorithmCapabilities,
    DatasetCapabilities,
    EngineCapabilities,
    ModelCapabilities,
    ModelFacts,
    Preflight,
    RewardCapabilities,
)
from cosmos_core.protocols.world import DecisionKind
from cosmos_core.run.planning.checks import problems
from cosmos_core.run.planning.parts import Measured, Parts


def planned(plugin: str, capabilities: AlgorithmCapabilities) -> list[str]:
    """Problems of a recipe of one step with an algorithm of these capabilities and the engine that suits it best."""
    kinds = capabilities.payload_kinds
    # Any temperature but 1: at 1 every sort of log-probs is the same.
    sampling = {"max_units": 16, "temperature": 0.7}
    chosen = {"run": {"name": "conformance", "steps": 1}, "model": {"config": {}}, "dataset": {"plugin": "any"}}
    rollout = {"group_size": max(2, capabilities.min_group_size), "sampling": sampling}
    scored = {"algorithm": {"plugin": plugin}, "reward": [{"plugin": "any"}], "rollout": rollout}
    recipe = structure({**chosen, **scored}, Recipe)
    facts = ModelFacts(
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
    parts = Parts(
        model=ModelCapabilities(payload_kinds=kinds),
        facts=facts,
        stages=[(stage, capabilities) for stage in stages(recipe)],
        rewards=[RewardCapabilities(payload_kinds=kinds)],
        dataset=DatasetCapabilities(demonstrations=True),
        engine=None,
        num_train_rows=10,
        num_heldout_rows=10,
        measured=Measured(num_rows=10, num_demonstrations=10, num_preferences=10, shortest_prompt=4, longest_prompt=8),
    )
    found = []
    for semantics, decisions in itertools.product(("processed", "raw"), get_args(DecisionKind)):
        engine = EngineCapabilities(logprob_semantics=semantics, payload_kinds=kinds)
        told = Preflight(decisions=decisions)
        found.append(problems(recipe, attrs.evolve(parts, engine=engine, preflight=told)))
    return min(found, key=len)
