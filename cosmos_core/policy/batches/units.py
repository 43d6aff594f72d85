"""How much work a payload is, whatever its kind: decisions to learn from, and units that they are conditioned on."""

from __future__ import annotations

import attrs

from cosmos_core.errors import DataError
from cosmos_core.types import Payload


@attrs.frozen(kw_only=True)
class Units:
    """Of one payload.

    Attributes:
        decisions: Tokens that were decided, or denoising steps.
        conditioning: Tokens of the prompt; what latents are conditioned on is no unit.
        others: Tokens of the completion that nobody decided.
    """

    decisions: int
    conditioning: int
    others: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.decisions + self.conditioning + self.others


def units_of(payload: Payload) -> Units:
    """The units of a payload of tokens or latents.

    Raises:
        DataError: It is of another kind, or its arrays do not say.
    """
    match payload.kind:
        case "tokens":
            prompt, completion = _length(payload, "prompt"), _length(payload, "completion")
            decided = _num_decided(payload, completion)
            return Units(decisions=decided, conditioning=prompt, others=completion - decided)
        case "latents":
            return Units(decisions=_length(payload, "times"), conditioning=0)
    raise DataError(f"a payload of kind {payload.kind!r} has no decisions; the policy trains on tokens or latents")


def _length(payload: Payload, name: str) -> int:
    array = payload.arrays.get(name)
    if array is None or len(array.shape) != 1:
        found = "none" if array is None else f"one of shape {array.shape}"
        raise DataError(f"a payload of kind {payload.kind!r} needs a flat array {name!r}, and has {found}")
    return array.shape[0]


def _num_decided(payload: Payload, completion: int) -> int:
    decided = payload.arrays.get("decided")
    if decided is None:
        return completion
    if (decided.dtype, decided.shape) != ("bool", (completion,)):
        raise DataError(
            f"'decided' is {decided.dtype} of shape {decided.shape}; it needs a bool for each of {completion} tokens"
        )
    return bytes(decided.data).count(1)
