"""What can be said of a run on the embedded engine before any process starts (`Provider.foresee`)."""

from __future__ import annotations

from collections.abc import Iterator

from cosmos_core.protocols import EngineOutlook, Foresight, Model, Recording
from cosmos_core.rollout.embedded.options import EmbeddedOptions

_COMPILES = "rollout.engine.options.compile: true, and"


def foresee(options: EmbeddedOptions, outlook: EngineOutlook) -> Foresight:
    """What the engine cannot do of a run."""
    return Foresight(problems=tuple(problems(options, outlook.model, outlook.num_ranks)))


def problems(options: EmbeddedOptions, model: Model, num_ranks: int) -> Iterator[str]:
    """What options ask for that cannot be had of a model on so many processes."""
    if not options.compile:
        return
    if num_ranks > 1:
        yield f"{_COMPILES} rollout.mesh.tp = {num_ranks}: a forward is compiled in one process only; leave out one"
    if isinstance(model, Recording) and model.records():
        names = ", ".join(record.name for record in model.records())
        yield f"{_COMPILES} the model records its forwards ({names}), which compiled ones do not; leave out one"
