"""Options of the embedded engine."""

from __future__ import annotations

import attrs

from cosmos_core.config.schema import POSITIVE, option


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
