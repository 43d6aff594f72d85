"""What algorithms have in common until they say otherwise."""

from __future__ import annotations

from cosmos_core.protocols.algorithm import Aggregation, OldLogprobs
from cosmos_core.protocols.relative import refuse_nonfinite
from cosmos_core.types import Group


class PlainAlgorithm:
    """An algorithm that asks for nothing, for others to inherit; `advantages` and `loss` are theirs to add.

    What differs is said in the class, or of an instance in its `__init__`. One that has all of `Algorithm` without
    inheriting is as good.

    Attributes:
        aggregation: Each decision of the batch alike.
        constant_length: Sums are not divided.
        old_logprobs: None are looked at.
        needs_entropy: No entropy term.
        skips_zero_advantage: Every sequence goes through the model.
    """

    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    constant_length: int = 1
    old_logprobs: OldLogprobs = "none"
    needs_entropy: bool = False
    skips_zero_advantage: bool = False

    def admit(self, group: Group) -> str | None:
        """Train on every group whose rewards are finite numbers."""
        return refuse_nonfinite(group)
