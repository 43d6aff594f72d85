"""The stages of a run: an optional warm-up, then the main one. Global steps count from 1 over all of them."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from cosmos_core.config.schema import OptimizerConfig, Recipe
from cosmos_core.types import JSON


@attrs.frozen(kw_only=True)
class Stage:
    """One algorithm with its optimizer, for some steps.

    Attributes:
        index: Place in the run, from 0.
        key: Table of the recipe that describes it, `warmup` or `algorithm`.
        plugin: Name of the algorithm plugin.
        options: The plugin's options as the recipe gives them.
        steps: Training steps of this stage.
        prompts_per_step: Prompts (or demonstrations) of one step, over all policy replicas.
        optimizer: Its optimizer; each stage starts a fresh one.
        first_step: Global steps before this stage; its own are `first_step + 1` to `last_step`.
    """

    index: int
    key: str
    plugin: str
    options: Mapping[str, JSON]
    steps: int
    prompts_per_step: int
    optimizer: OptimizerConfig
    first_step: int

    @property
    def last_step(self) -> int:
        """The global step with which the stage ends."""
        return self.first_step + self.steps


def stages(recipe: Recipe) -> tuple[Stage, ...]:
    """The stages of a recipe, in order."""
    warmup = recipe.warmup
    main = Stage(
        index=0 if warmup is None else 1,
        key="algorithm",
        plugin=recipe.algorithm.plugin,
        options=recipe.algorithm.options,
        steps=recipe.run.steps,
        prompts_per_step=recipe.policy.prompts_per_step,
        optimizer=recipe.policy.optimizer,
        first_step=0 if warmup is None else warmup.steps,
    )
    if warmup is None:
        return (main,)
    first = Stage(
        index=0,
        key="warmup",
        plugin=warmup.plugin,
        options=warmup.options,
        steps=warmup.steps,
        prompts_per_step=warmup.prompts_per_step,
        optimizer=warmup.optimizer,
        first_step=0,
    )
    return (first, main)
