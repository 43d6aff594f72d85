"""The contract with plugins: the names that every plugin of a kind meets. Importing it imports no torch.

Names that only some plugins need are in the module of their subject, such as `cosmos_core.protocols.world`.
"""

from cosmos_core.protocols.algorithm import (
    Aggregation,
    Algorithm,
    AlgorithmCapabilities,
    AlgorithmContext,
    Decisions,
    Loss,
)
from cosmos_core.protocols.dataset import Dataset, DatasetCapabilities, DatasetContext, Split
from cosmos_core.protocols.engine import (
    CachePolicy,
    EngineCapabilities,
    EngineContext,
    EngineStats,
    FinishReason,
    Generated,
    Handle,
    PauseMode,
    Request,
    RolloutEngine,
    Sampling,
    TensorSlice,
)
from cosmos_core.protocols.environment import (
    Agent,
    Environment,
    EnvironmentCapabilities,
    EnvironmentContext,
    Session,
    Turn,
)
from cosmos_core.protocols.facts import ModelFacts
from cosmos_core.protocols.hooks import RunInfo, hookimpl
from cosmos_core.protocols.launcher import Exit, Launcher, LauncherCapabilities, LauncherContext, Pool, ProcessSpec
from cosmos_core.protocols.layout import Layout
from cosmos_core.protocols.model import Decided, MicroBatch, Model, ModelCapabilities, ModelContext
from cosmos_core.protocols.objectives import PlainAlgorithm
from cosmos_core.protocols.provider import KINDS, PROTOCOL_VERSIONS, Kind, NoOptions, PlannedRun, Preflight, Provider
from cosmos_core.protocols.reward import Completion, Reward, RewardCapabilities, RewardContext, Score

__all__ = [
    "KINDS",
    "PROTOCOL_VERSIONS",
    "Agent",
    "Aggregation",
    "Algorithm",
    "AlgorithmCapabilities",
    "AlgorithmContext",
    "CachePolicy",
    "Completion",
    "Dataset",
    "DatasetCapabilities",
    "DatasetContext",
    "Decided",
    "Decisions",
    "EngineCapabilities",
    "EngineContext",
    "EngineStats",
    "Environment",
    "EnvironmentCapabilities",
    "EnvironmentContext",
    "Exit",
    "FinishReason",
    "Generated",
    "Handle",
    "Kind",
    "Launcher",
    "LauncherCapabilities",
    "LauncherContext",
    "Layout",
    "Loss",
    "MicroBatch",
    "Model",
    "ModelCapabilities",
    "ModelContext",
    "ModelFacts",
    "NoOptions",
    "PauseMode",
    "PlainAlgorithm",
    "PlannedRun",
    "Pool",
    "Preflight",
    "ProcessSpec",
    "Provider",
    "Request",
    "Reward",
    "RewardCapabilities",
    "RewardContext",
    "RolloutEngine",
    "RunInfo",
    "Sampling",
    "Score",
    "Session",
    "Split",
    "TensorSlice",
    "Turn",
    "hookimpl",
]
