"""The options of the embedded engine, and what of a run they rule out."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from cosmos_core.config.schema import POSITIVE, option
from cosmos_core.protocols import Model, ModelFacts, PlannedRun, Preflight
from cosmos_core.protocols.model import MoEModel


@attrs.frozen(kw_only=True)
class EmbeddedOptions:
    """Options of the embedded engine."""

    prefill_units: int = option(
        1024,
        help="Prompt units processed between two decoded units, at most; longer prompts go in parts.",
        validator=POSITIVE,
    )
    cache_step: int = option(
        32, help="The width of the KV cache changes by this many units per sequence.", validator=POSITIVE
    )
    pack_matrices: bool = option(
        True,
        help="On a CPU in bfloat16: keep matrices packed for its kernels too: faster, at twice the memory.",
    )
    compile: bool = option(
        False,
        help="Compile the forward at start: faster steps, a longer start. On a CPU it needs a C++ compiler.",
    )
    verify: bool = option(
        True, help="Whether to check at start that the model decodes to the same log-probs as its own forward."
    )


def preflight(options: EmbeddedOptions, planned: PlannedRun) -> Preflight:
    """Say what the engine cannot do of a run."""
    return Preflight(problems=tuple(problems(options, planned.model, planned.facts)))


def problems(options: EmbeddedOptions, model: Model, facts: ModelFacts) -> Iterator[str]:
    """Yield what the engine, or its options, ask for that a model cannot give."""
    if not facts.attends_pluggably:
        yield (
            f"rollout.engine.plugin: 'embedded' decodes through transformers' attention interface, and not all layers "
            f"of {facts.architecture} are known to attend through it (ModelFacts.attends_pluggably); take another "
            "engine, such as 'vllm', or train on demonstrations: algorithm.plugin = 'sft', without rewards; an author "
            "whose module is a transformers one, with that interface throughout, sets the fact"
        )
    elif options.compile and isinstance(model, MoEModel) and model.records():
        names = ", ".join(record.name for record in model.records())
        yield (
            f"rollout.engine.options.compile: true, and the model records its forwards ({names}), which compiled ones "
            "do not; leave out one"
        )
