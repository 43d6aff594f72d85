"""What a plugin hands to the core: how to make one, its options class, what it can do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import attrs

from cosmos_core.protocols.foresight import Foresight

T_co = TypeVar("T_co", covariant=True)


@attrs.frozen(kw_only=True)
class NoOptions:
    """The options of a plugin that has none."""


@attrs.frozen(kw_only=True)
class Provider(Generic[T_co]):
    """What a provider hook returns.

    Attributes:
        create: Makes an instance: `create(options, context)`, `options` being an instance of the options class
            and `context` the record of that kind (`ModelContext`, `RewardContext`, …).
        options: The plugin's frozen attrs class; `[<kind>.options]` of the recipe is structured into it and
            unknown keys are refused. Each attribute documents itself with `metadata={"help": …}`.
        capabilities: The record of that kind (`ModelCapabilities`, …): what is declared is tested and relied
            on. None takes that record's defaults.
        protocol: The protocol version it was written for (`cosmos_core.protocols.PROTOCOL_VERSIONS`).
        foresee: Of engines: looks at a planned run, `foresee(options, outlook)` with an `EngineOutlook`, and returns a
            `Foresight`. Planning waits for it: it starts nothing, needs no GPU, and imports no more of the engine
            than the answer takes. None foresees nothing.
    """

    create: Callable[..., T_co]
    options: type = NoOptions
    capabilities: Any = None
    protocol: int = 1
    foresee: Callable[..., Foresight] | None = None
