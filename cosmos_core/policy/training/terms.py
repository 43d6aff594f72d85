"""What a trainer goes by: the stage of its recipe, and the values of dynamic keys that its orders carry."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

import attrs

from cosmos_core.config.job import Job
from cosmos_core.config.loading import recipe_with
from cosmos_core.config.stages import Stage, stages
from cosmos_core.errors import CheckpointError, ConfigError
from cosmos_core.plugins.roles import load_algorithm, source_of, unmet
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.policy.training.trainer import Trainer
from cosmos_core.protocols import Algorithm
from cosmos_core.types import Scalar

_LOG: Final = logging.getLogger(__name__)


class OrderTerms:
    """Makes a trainer take up stages, and go by the values of each step's order.

    Args:
        job: The run; its recipe is as it was at first.
        plugins: Its plugins.
        trainer: The trainer.
    """

    def __init__(self, job: Job, plugins: PluginSet, trainer: Trainer) -> None:
        self._job: Final = job
        self._plugins: Final = plugins
        self._trainer: Final = trainer
        self._present = job
        self._values: Mapping[str, Scalar] = {}

    def begin_stage(self, index: int) -> None:
        """Take up a stage.

        Raises:
            CheckpointError: The recipe has no such stage.
            ConfigError: The algorithm refuses its options, or the recipe lacks a model that it needs.
            PluginError: The algorithm failed.
        """
        known = stages(self._present.recipe)
        if index >= len(known):
            raise CheckpointError(
                f"a checkpoint of stage {index}, and the recipe has {len(known)}: it is another run's"
            )
        stage = known[index]
        is_rollouts = source_of(self._plugins, stage) == "rollouts"
        # Sequences that were drawn at another temperature than the recipe's say so themselves.
        temperature = self._job.recipe.rollout.sampling.temperature if is_rollouts else 1.0
        self._trainer.begin_stage(stage, self._algorithm(stage), temperature)

    def adopt(self, values: Mapping[str, Scalar]) -> None:
        """Go by these values from the next step on.

        Args:
            values: Of dynamic keys that are not as in the recipe.

        Raises:
            ConfigError: The algorithm refuses its options, or the recipe its values.
            PluginError: The algorithm failed.
        """
        if values == self._values:
            return
        recipe = recipe_with(self._job.recipe, values)
        self._present = attrs.evolve(self._job, recipe=recipe)
        stage = stages(recipe)[self._trainer.stage.index]
        self._trainer.change(stage, self._algorithm(stage))
        _LOG.info("from step %d on, other than the recipe: %s", self._trainer.step + 1, dict(values) or "nothing")
        self._values = dict(values)

    def _algorithm(self, stage: Stage) -> Algorithm:
        algorithm = load_algorithm(self._present, self._plugins, stage)
        if lacking := [*unmet(self._present.recipe, stage, algorithm)]:
            raise ConfigError("\n".join(lacking))
        return algorithm
