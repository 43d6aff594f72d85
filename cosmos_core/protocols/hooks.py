"""pluggy hook specifications: the provider hook of each kind, and the lifecycle hooks.

A plugin's entry point names a module (or any object) with functions marked `@hookimpl`. Lifecycle hooks run
beside the run, in the order things happened, on a thread that can neither block nor break it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import pluggy

from cosmos_core.types import JSON, Scalar

if TYPE_CHECKING:
    from cosmos_core.protocols.algorithm import Algorithm
    from cosmos_core.protocols.dataset import Dataset
    from cosmos_core.protocols.engine import RolloutEngine
    from cosmos_core.protocols.environment import Environment
    from cosmos_core.protocols.launcher import Launcher
    from cosmos_core.protocols.model import Model
    from cosmos_core.protocols.provider import Provider
    from cosmos_core.protocols.reward import Reward

PROJECT: Final = "cosmos_core"

hookspec: Final = pluggy.HookspecMarker(PROJECT)
hookimpl: Final = pluggy.HookimplMarker(PROJECT)


@attrs.frozen(kw_only=True)
class RunInfo:
    """The run, as a lifecycle hook is told of it.

    Attributes:
        run_id: Unique id of the run; a resumed run keeps it.
        name: `run.name`.
        directory: The run's folder.
        recipe: The resolved recipe as plain data.
        resumed_from: Step of the checkpoint that the run resumes from; None for a new run.
    """

    run_id: str
    name: str
    directory: Path
    recipe: Mapping[str, JSON]
    resumed_from: int | None = None


@hookspec(firstresult=True)
def cosmos_model() -> Provider[Model]:
    """Provide a model family."""
    raise AssertionError


@hookspec(firstresult=True)
def cosmos_algorithm() -> Provider[Algorithm]:
    """Provide a training objective."""
    raise AssertionError


@hookspec(firstresult=True)
def cosmos_reward() -> Provider[Reward]:
    """Provide a reward."""
    raise AssertionError


@hookspec(firstresult=True)
def cosmos_dataset() -> Provider[Dataset]:
    """Provide a dataset."""
    raise AssertionError


@hookspec(firstresult=True)
def cosmos_engine() -> Provider[RolloutEngine]:
    """Provide a rollout engine."""
    raise AssertionError


@hookspec(firstresult=True)
def cosmos_environment() -> Provider[Environment]:
    """Provide an environment."""
    raise AssertionError


@hookspec(firstresult=True)
def cosmos_launcher() -> Provider[Launcher]:
    """Provide a launcher."""
    raise AssertionError


@hookspec(firstresult=True)
def cosmos_hook() -> Provider[object]:
    """Provide an object with lifecycle hooks; it is registered with the run's plugin manager."""
    raise AssertionError


@hookspec
def cosmos_run_started(run: RunInfo) -> None:
    """The run's processes are about to start."""


@hookspec
def cosmos_step_finished(run: RunInfo, step: int, metrics: Mapping[str, float]) -> None:
    """A training step was applied on every policy replica."""


@hookspec
def cosmos_evaluation_finished(run: RunInfo, step: int, metrics: Mapping[str, float]) -> None:
    """Held-out prompts were evaluated at the weights of `step`."""


@hookspec
def cosmos_checkpoint_saved(run: RunInfo, step: int, path: str) -> None:
    """A checkpoint is complete at `path`."""


@hookspec
def cosmos_weights_published(run: RunInfo, version: int, digest: str) -> None:
    """A weight version is ready for rollout replicas."""


@hookspec
def cosmos_setting_changed(run: RunInfo, step: int, key: str, before: Scalar, after: Scalar) -> None:
    """A person changed a dynamic key of the recipe while the run goes on; steps go by it from `step` on."""


@hookspec
def cosmos_replica_joined(run: RunInfo, replica: str, role: str) -> None:
    """A replica registered with the controller."""


@hookspec
def cosmos_replica_left(run: RunInfo, replica: str, role: str, reason: str) -> None:
    """A replica left, was fenced or was lost."""


@hookspec
def cosmos_run_ended(run: RunInfo, outcome: str, summary: Mapping[str, JSON]) -> str | None:
    """The run is over; `outcome` is `finished`, `stopped` or `failed`. A text that is returned is printed."""
