"""The recipe: every key, its type, default, bounds and help.

The reference in the documentation is generated from these classes, so `help` is written for users.
Validators reject, they never rewrite.
"""

from cosmos_core.config.schema.fields import (
    ABOVE_ZERO,
    FRACTION,
    LEAST_TEMPERATURE,
    NAME,
    NOT_NEGATIVE,
    POSITIVE,
    option,
)
from cosmos_core.config.schema.generation import EngineConfig, RolloutConfig, SamplingConfig, SyncConfig
from cosmos_core.config.schema.operation import ControlConfig, LaunchConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.subject import (
    AlgorithmConfig,
    DatasetConfig,
    EnvironmentConfig,
    EvaluationConfig,
    FrozenConfig,
    ModelConfig,
    RewardConfig,
    RunConfig,
    TokenizerConfig,
    TrackingConfig,
)
from cosmos_core.config.schema.training import (
    AverageConfig,
    CheckpointConfig,
    CriticConfig,
    Float8Config,
    LoraConfig,
    MeshConfig,
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
    WarmupConfig,
)

__all__ = [
    "ABOVE_ZERO",
    "FRACTION",
    "LEAST_TEMPERATURE",
    "NAME",
    "NOT_NEGATIVE",
    "POSITIVE",
    "AlgorithmConfig",
    "AverageConfig",
    "CheckpointConfig",
    "ControlConfig",
    "CriticConfig",
    "DatasetConfig",
    "EngineConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "Float8Config",
    "FrozenConfig",
    "LaunchConfig",
    "LoraConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PolicyConfig",
    "Recipe",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "SyncConfig",
    "TokenizerConfig",
    "TrackingConfig",
    "WarmupConfig",
    "option",
]
