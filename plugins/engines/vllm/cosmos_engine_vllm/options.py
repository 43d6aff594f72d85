"""Options of the vLLM engine."""

from __future__ import annotations

from typing import Literal

import attrs

from cosmos_core.config.schema import ABOVE_ZERO, FRACTION, POSITIVE, option


@attrs.frozen(kw_only=True)
class VllmOptions:
    """Options of the vLLM engine."""

    prefill_units: int = option(
        2048,
        help="Units processed in one step, at most; longer prompts go in parts, on a CPU whole.",
        validator=POSITIVE,
    )
    block_size: int = option(
        32, help="Units of a block of the KV cache; samples share whole blocks of a prompt.", validator=POSITIVE
    )
    cache_gib: float = option(
        4.0,
        help="Largest KV cache on a CPU, in GiB: less where `rollout.max_in_flight` sequences need less.",
        validator=ABOVE_ZERO,
    )
    memory_share: float = option(
        0.85, help="Share of a GPU's memory that weights and KV cache may take.", validator=FRACTION
    )
    compile: bool = option(True, help="Whether to compile the model and capture CUDA graphs, on a GPU.")
    seeds: Literal["auto", "request", "engine"] = option(
        "auto",
        help="Whose random numbers draw: each request's own, which a lease that is repeated draws again, or the "
        'engine\'s for a whole batch, which is faster. "auto" is "request" on a CPU and "engine" on a GPU.',
    )
    expert_parallel: bool = option(
        False,
        help="With `rollout.mesh.tp` above 1: whether each process has whole experts, and not a part of each.",
    )
    verify: bool = option(
        True, help="Whether to check at start that vLLM gives the same log-probs as the model's own forward."
    )
