"""The provider that a plugin hands to the core: how to make one, its options class, what it can do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeAlias, TypeVar

import attrs

from cosmos_core.protocols.engine import Sampling
from cosmos_core.protocols.facts import ModelFacts
from cosmos_core.protocols.world import DecisionKind

if TYPE_CHECKING:
    from cosmos_core.protocols.model import Model


@attrs.frozen(kw_only=True, eq=False)
class PlannedRun:
    """An engine's part in a run, as far as it is known when that is planned.

    Attributes:
        model: The model plugin's instance.
        facts: Of the model, found without weights.
        device: Where it will generate, as the recipe says.
        has_gpu: Whether this machine, where `auto` may be decided, has a GPU.
        precision: Name of the torch dtype of its weights.
        temperatures: Each temperature at which it will draw, by the recipe's key.
        samplings: How it will draw, by the recipe's table: `rollout.sampling`, `evaluation`; empty if not known.
        shows_media: Whether prompts show images or videos.
        num_ranks: Processes of a replica.
        sleeps: Whether it is to sleep (`SleepingEngine`) while the policy trains.
    """

    model: Model
    facts: ModelFacts
    device: Literal["auto", "cpu", "cuda"]
    has_gpu: bool
    precision: str
    temperatures: Mapping[str, float]
    shows_media: bool
    num_ranks: int = 1
    samplings: Mapping[str, Sampling] = attrs.field(factory=dict)
    sleeps: bool = False


@attrs.frozen(kw_only=True)
class Preflight:
    """An engine's answer to a planned run.

    Attributes:
        problems: What it cannot do, wherever it runs: `key: what, value seen; what to do`.
        absent: What it lacks on this machine, and what to do: such a run can be planned, not started.
        decisions: Of latents, which decisions it makes of rollouts; None: it makes tokens, or does not say.
        decisions_key: The key of the recipe that says so.
        most_decisions: Most decisions of one sample to train on; 0: as many as `rollout.sampling.max_units`.
        gpu_share: The part of a GPU's memory that each process takes, however much it needs; 0: no more than it needs.
        gpu_share_key: The key of the recipe that says so.
        outside_bytes: Of a GPU, what each process takes besides what plans count, and keeps while it sleeps.
        builds_on_host: Whether its first weights are made in the machine's memory, all of them, wherever it computes.
        kept_share: Of a run of dialogues, what it keeps of turns that ended beside the KV cache, as a share of it.
        cache_bytes: Most that its KV cache takes in each process; 0: what all in flight need at their longest.
        cache_key: The key of the recipe that says so.
    """

    problems: tuple[str, ...] = ()
    absent: str = ""
    decisions: DecisionKind | None = None
    decisions_key: str = "rollout.engine.plugin"
    most_decisions: int = 0
    gpu_share: float = 0.0
    gpu_share_key: str = "rollout.engine.plugin"
    outside_bytes: int = 0
    builds_on_host: bool = False
    kept_share: float = 0.0
    cache_bytes: int = 0
    cache_key: str = "rollout.engine.plugin"


T_co = TypeVar("T_co", covariant=True)


@attrs.frozen(kw_only=True)
class NoOptions:
    """The options of a plugin that has none."""


@attrs.frozen(kw_only=True)
class Provider(Generic[T_co]):
    """The return value of a provider hook.

    Attributes:
        create: Makes an instance: `create(options, context)`, `options` being an instance of the options class
            and `context` the record of that kind (`ModelContext`, `RewardContext`, …).
        options: The plugin's frozen attrs class; `[<kind>.options]` of the recipe is structured into it and
            unknown keys are refused. Each attribute documents itself with `metadata={"help": …}`.
        capabilities: The record of that kind (`ModelCapabilities`, …), tested and relied on; None: its defaults.
        protocol: The protocol version it was written for (`cosmos_core.protocols.PROTOCOL_VERSIONS`).
        preflight: Of engines: looks at a planned run, `preflight(options, planned)` with a `PlannedRun`, and returns a
            `Preflight`. It starts nothing, needs no GPU, and imports no more than the answer takes. None says nothing.
    """

    create: Callable[..., T_co]
    options: type = NoOptions
    capabilities: Any = None
    protocol: int = 1
    preflight: Callable[..., Preflight] | None = None


Kind: TypeAlias = Literal["model", "algorithm", "reward", "dataset", "engine", "environment", "launcher", "hook"]

PROTOCOL_VERSIONS: Final[Mapping[Kind, int]] = {
    "model": 1,
    "algorithm": 1,
    "reward": 1,
    "dataset": 1,
    "engine": 1,
    "environment": 1,
    "launcher": 1,
    "hook": 1,
}

DEPRECATED_PROTOCOLS: Final[Mapping[Kind, Mapping[int, str]]] = {}
"""Older versions that are still accepted, each with the release of the core that will refuse it."""

KINDS: Final[tuple[Kind, ...]] = tuple(PROTOCOL_VERSIONS)


def entry_point_group(kind: Kind) -> str:
    """The entry-point group in which plugins of `kind` are found."""
    return f"cosmos_core.{kind}s"
