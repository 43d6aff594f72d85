"""A published state of the policy's weights."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class WeightVersion:
    """Weights after `number` optimizer steps of the run, attested by `digest`.

    Attributes:
        number: Optimizer steps taken so far; 0 is the initial model.
        digest: Hex digest over every canonical tensor as published (see `cosmos_core.weights.digest`).
    """

    number: int
    digest: str
