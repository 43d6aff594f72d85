"""What can be said of a run on the embedded engine before any process starts (`Provider.foresee`)."""

from __future__ import annotations

from collections.abc import Iterator

from cosmos_core.protocols import EngineOutlook, Foresight, Model, Recording
from cosmos_core.rollout.embedded.options import EmbeddedOptions


def foresee(options: EmbeddedOptions, outlook: EngineOutlook) -> Foresight:
    """What the engine cannot do of a run."""
    return Foresight(problems=tuple(problems(options, outlook.model)))


def problems(options: EmbeddedOptions, model: Model) -> Iterator[str]:
    """What options ask for that cannot be had of a model."""
    if not options.compile:
        return
    if isinstance(model, Recording) and model.records():
        names = ", ".join(record.name for record in model.records())
        yield (
            f"rollout.engine.options.compile: true, and the model records its forwards ({names}), which compiled ones "
            "do not; leave out one"
        )
