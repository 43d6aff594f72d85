"""The options of the embedded engine, and what of a run they rule out."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
from attrs import validators as check

from cosmos_core.config.schema import ABOVE_ZERO, FRACTION, POSITIVE, option
from cosmos_core.protocols import Model, PlannedRun, Preflight
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
        32, help="The width of a dense KV cache changes by this many units per sequence.", validator=POSITIVE
    )
    cache_gib: float | None = option(
        None,
        help="Largest KV cache, in GiB, where it is in pages (on GPUs): while `rollout.max_in_flight` sequences do not "
        "fit, fewer are in flight. Absent: it has room for all of them at their longest.",
        validator=check.optional(ABOVE_ZERO),
    )
    prefix_cache: float = option(
        0.5,
        help="Turns of dialogues that ended are kept for the next one: in pages (on GPUs), in up to this share of the "
        "KV cache of what is in flight, while that leaves it; on a CPU, in so much memory beside it. 0 keeps none.",
        validator=FRACTION,
    )
    pack_matrices: bool = option(
        True, help="On a CPU in bfloat16: keep matrices packed for its kernels too: faster, at twice the memory."
    )
    cuda_graphs: bool = option(
        True, help="On CUDA, where its cache is in pages: replay steps that only decode as CUDA graphs."
    )
    compile: bool = option(
        False, help="Compile the forward at start: faster steps, a longer start. On a CPU it needs a C++ compiler."
    )
    verify: bool = option(
        True, help="Whether to check at start that the model decodes to the same log-probs as its own forward."
    )


def preflight(options: EmbeddedOptions, planned: PlannedRun) -> Preflight:
    """Say what the engine cannot do of a run."""
    if planned.facts.attends_pluggably:
        # On GPUs the cache itself has room for it.
        is_gpu = planned.device == "cuda" or (planned.device == "auto" and planned.has_gpu)
        return Preflight(
            problems=tuple(problems(options, planned.model)),
            kept_share=0.0 if is_gpu else options.prefix_cache,
            cache_bytes=0 if planned.device == "cpu" else int((options.cache_gib or 0) * 2**30),
            cache_key="rollout.engine.options.cache_gib",
        )
    problem = (
        "rollout.engine.plugin: 'embedded' decodes through transformers' attention interface, and not all layers of "
        f"{planned.facts.architecture} are known to attend through it; take another engine, or train on demonstrations "
        "(algorithm.plugin = 'sft', without rewards); a model plugin whose modules are transformers' own, with that "
        "interface throughout, says so in ModelFacts.attends_pluggably"
    )
    return Preflight(problems=(problem,))


def problems(options: EmbeddedOptions, model: Model) -> Iterator[str]:
    """Yield what options ask for that a model cannot give."""
    if options.compile and isinstance(model, MoEModel) and model.records():
        names = ", ".join(record.name for record in model.records())
        yield (
            f"rollout.engine.options.compile: true, and the model records its forwards ({names}), which compiled ones "
            "do not; leave out one"
        )
