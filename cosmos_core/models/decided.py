"""What is decided as named tensors with one row a decision: what hooks round a forward pass on, and slices join.

Shape legend: N decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import attrs
import torch

from cosmos_core.protocols import Blended, Comparison, Decided, KLTarget

_PREDICTION: Final = "prediction."


@attrs.frozen(kw_only=True, eq=False)
class Asked:
    """What is asked of a forward (see `cosmos_core.protocols.Model.decide`)."""

    temperature: float
    with_entropy: bool = False
    prediction_for: Comparison | None = None
    kl_target: KLTarget | None = None
    with_features: bool = False


def tensors_of(decided: Decided) -> dict[str, torch.Tensor]:
    """The tensors [N, ...] that there are, by name."""
    own = {
        "logprobs_N": decided.logprobs_N,
        "entropy_N": decided.entropy_N,
        "divergence_N": decided.divergence_N,
        "features_ND": decided.features_ND,
        **({} if decided.blended is None else attrs.asdict(decided.blended, recurse=False)),
    }
    shown = {} if decided.prediction is None else decided.prediction
    return {name: tensor for name, tensor in own.items() if tensor is not None} | {
        _PREDICTION + name: tensor for name, tensor in shown.items()
    }


def decided_of(tensors: Mapping[str, torch.Tensor]) -> Decided:
    """The reverse of `tensors_of`."""
    shown = {name.removeprefix(_PREDICTION): each for name, each in tensors.items() if name.startswith(_PREDICTION)}
    blended = None
    if "squared_NK" in tensors:
        blended = Blended(squared_NK=tensors["squared_NK"], absolute_NK=tensors["absolute_NK"])
    return Decided(
        logprobs_N=tensors["logprobs_N"],
        entropy_N=tensors.get("entropy_N"),
        prediction=shown or None,
        divergence_N=tensors.get("divergence_N"),
        blended=blended,
        features_ND=tensors.get("features_ND"),
    )


def sliced(kl_target: KLTarget | None, own: Callable[[torch.Tensor], torch.Tensor]) -> KLTarget | None:
    """What some of the decisions are compared with; `own` takes these out of [N, ...]."""
    if kl_target is None:
        return None
    arrays = {name: own(tensor) for name, tensor in kl_target.prediction.items()}
    return attrs.evolve(kl_target, prediction=arrays)
