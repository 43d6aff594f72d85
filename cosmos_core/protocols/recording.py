"""What a model's forwards did: counted in a training step, or recorded while they generated.

Shape legend: P units of a prompt, N units after them, or of a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import attrs

if TYPE_CHECKING:
    import torch


@runtime_checkable
class AfterStep(Protocol):
    """A model that counts what its forwards did in a step, and acts on it once the step is applied.

    Optional, beside `Model`. It counts in forwards of micro-batches that have `weights_N`.
    """

    def counters(self, module: torch.nn.Module) -> Sequence[torch.Tensor]:
        """The counts, float32, of the parts of the module that this process holds; overwritten with their sums.

        They are zeroed before the first forward of a step and summed over every process that has other sequences, or
        another slice of them, before `after_step`.
        """
        ...

    def after_step(self, module: torch.nn.Module) -> Mapping[str, float]:
        """Act on the sums, alike on every process that holds the same part; metrics to report.

        Parameters that have gradients are the optimizer's alone.
        """
        ...


@attrs.frozen(kw_only=True)
class Record:
    """An array of payloads that a model's forwards make while an engine generates.

    Attributes:
        name: Of the array.
        dtype: A key of `cosmos_core.types.payload.ITEM_SIZES`.
        shape: Of one unit.
        option: The recipe's key that asks for it, such as `model.options.router_replay`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    option: str


@runtime_checkable
class Recording(Protocol):
    """A model that trains on something that its forwards did while they generated.

    Optional, beside `Model`. An engine that records (`EngineCapabilities.records`) adds each array to the payloads of
    completions, as [P + N - 1, *shape]: all units but the last, which went through no forward. A unit's record is that
    of the forward which computed what the engine has cached of it: computed anew after an update, it is recorded anew.
    """

    def records(self) -> Sequence[Record]:
        """What the model's options ask for, found without weights; nothing where they ask for nothing."""
        ...

    def record(self, module: torch.nn.Module) -> Callable[[], Mapping[str, torch.Tensor]]:
        """Begin to record the forwards of a module, for as long as it lives.

        Returns:
            What the newest forward recorded, by name: [N, *shape] for its N units in their order, on its device.
        """
        ...
