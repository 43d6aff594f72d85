"""The conformance kits, which plugins prove themselves with.

Needs pytest: `pip install "cosmos-core[testing]"`. A kit is imported when it is asked for; those of rewards and
environments need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from cosmos_core.protocols import Kind

if TYPE_CHECKING:
    from cosmos_core.testing.conformance.agent import AgentConformance as AgentConformance
    from cosmos_core.testing.conformance.algorithm.kit import AlgorithmConformance as AlgorithmConformance
    from cosmos_core.testing.conformance.dataset import DatasetConformance as DatasetConformance
    from cosmos_core.testing.conformance.engine.kit import EngineConformance as EngineConformance
    from cosmos_core.testing.conformance.engine.latents import DenoisingEngineConformance as DenoisingEngineConformance
    from cosmos_core.testing.conformance.environment import EnvironmentConformance as EnvironmentConformance
    from cosmos_core.testing.conformance.hook import HookConformance as HookConformance
    from cosmos_core.testing.conformance.launcher import LauncherConformance as LauncherConformance
    from cosmos_core.testing.conformance.model.kit import DenoisingModelConformance as DenoisingModelConformance
    from cosmos_core.testing.conformance.model.kit import ModelConformance as ModelConformance
    from cosmos_core.testing.conformance.plugin import fault as fault
    from cosmos_core.testing.conformance.reward import RewardConformance as RewardConformance

_HOMES: Final = {
    "AgentConformance": "agent",
    "AlgorithmConformance": "algorithm.kit",
    "DatasetConformance": "dataset",
    "DenoisingEngineConformance": "engine.latents",
    "DenoisingModelConformance": "model.kit",
    "EngineConformance": "engine.kit",
    "EnvironmentConformance": "environment",
    "HookConformance": "hook",
    "LauncherConformance": "launcher",
    "ModelConformance": "model.kit",
    "RewardConformance": "reward",
    "fault": "plugin",
}
__all__ = list(_HOMES)


def kit_of(kind: Kind, capabilities: object = None) -> str:
    """The name of the kit for plugins of a kind that declare these capabilities."""
    return f"{'Agent' if getattr(capabilities, 'calls_model', False) else kind.capitalize()}Conformance"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.conformance.{_HOMES[name]}"), name)
