"""The conformance kits, which plugins prove themselves with.

Needs pytest: `pip install "cosmos-core[testing]"`. A kit is imported when it is asked for; those of rewards and
environments need no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from cosmos_core.testing.conformance.algorithm.kit import AlgorithmConformance
    from cosmos_core.testing.conformance.dataset import DatasetConformance
    from cosmos_core.testing.conformance.engine.kit import EngineConformance
    from cosmos_core.testing.conformance.engine.latents import DenoisingEngineConformance
    from cosmos_core.testing.conformance.environment import EnvironmentConformance
    from cosmos_core.testing.conformance.hook import HookConformance
    from cosmos_core.testing.conformance.launcher import LauncherConformance
    from cosmos_core.testing.conformance.model.kit import DenoisingModelConformance, ModelConformance
    from cosmos_core.testing.conformance.plugin import fault
    from cosmos_core.testing.conformance.reward import RewardConformance

__all__ = [
    "AlgorithmConformance",
    "DatasetConformance",
    "DenoisingEngineConformance",
    "DenoisingModelConformance",
    "EngineConformance",
    "EnvironmentConformance",
    "HookConformance",
    "LauncherConformance",
    "ModelConformance",
    "RewardConformance",
    "fault",
]

_HOMES: Final[Mapping[str, str]] = {
    "AlgorithmConformance": "conformance.algorithm.kit",
    "DatasetConformance": "conformance.dataset",
    "DenoisingEngineConformance": "conformance.engine.latents",
    "DenoisingModelConformance": "conformance.model.kit",
    "EngineConformance": "conformance.engine.kit",
    "EnvironmentConformance": "conformance.environment",
    "HookConformance": "conformance.hook",
    "LauncherConformance": "conformance.launcher",
    "ModelConformance": "conformance.model.kit",
    "RewardConformance": "conformance.reward",
    "fault": "conformance.plugin",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
