"""The recipe as a whole."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from cosmos_core.config.schema.fields import option
from cosmos_core.config.schema.generation import RolloutConfig, SyncConfig
from cosmos_core.config.schema.operation import ControlConfig, LaunchConfig
from cosmos_core.config.schema.subject import (
    AlgorithmConfig,
    DatasetConfig,
    EnvironmentConfig,
    EvaluationConfig,
    FrozenConfig,
    ModelConfig,
    RewardConfig,
    RunConfig,
    TrackingConfig,
)
from cosmos_core.config.schema.training import CriticConfig, PolicyConfig, WarmupConfig
from cosmos_core.protocols import FrozenRole


@attrs.frozen(kw_only=True)
class Recipe:
    """A whole run."""

    run: RunConfig = option(help="The run itself.")
    model: ModelConfig = option(help="The model to train.")
    algorithm: AlgorithmConfig = option(help="The training objective.")
    dataset: DatasetConfig = option(help="Where prompts come from.")
    reward: tuple[RewardConfig, ...] = option((), help="The rewards.")
    reference: FrozenConfig | None = option(None, help="The frozen model that the policy is compared with.")
    teacher: FrozenConfig | None = option(None, help="The frozen model that the policy learns from.")
    critic: CriticConfig | None = option(None, help="A head that estimates returns.")
    environment: EnvironmentConfig | None = option(None, help="What answers the model's turns.")
    warmup: WarmupConfig | None = option(None, help="A supervised stage before the main one.")
    policy: PolicyConfig = option(factory=PolicyConfig, help="Policy replicas.")
    rollout: RolloutConfig = option(factory=RolloutConfig, help="Rollout replicas.")
    sync: SyncConfig = option(factory=SyncConfig, help="How the two pools keep pace.")
    evaluation: EvaluationConfig = option(factory=EvaluationConfig, help="Held-out evaluation.")
    tracking: TrackingConfig = option(factory=TrackingConfig, help="Trackers and other lifecycle hooks.")
    control: ControlConfig = option(factory=ControlConfig, help="The controller.")
    launch: LaunchConfig = option(factory=LaunchConfig, help="How processes are started.")

    @property
    def frozen(self) -> Mapping[FrozenRole, FrozenConfig]:
        """The frozen models, by role."""
        named: dict[FrozenRole, FrozenConfig | None] = {"reference": self.reference, "teacher": self.teacher}
        return {role: config for role, config in named.items() if config is not None}

    @property
    def reward_names(self) -> tuple[str, ...]:
        """What a sample's reward is the weighted sum of: the rewards, and the environment's own where it counts."""
        names = tuple(reward.label for reward in self.reward)
        if self.environment is None or self.environment.weight == 0.0:
            return names
        return (*names, self.environment.plugin)
