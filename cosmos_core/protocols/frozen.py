"""Models that an algorithm consults and does not train: a reference, a teacher, the policy's own moving average.

Shape legend: N decisions of a micro-batch, K blends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias

import attrs

if TYPE_CHECKING:
    import torch

FrozenRole: TypeAlias = Literal["reference", "teacher", "average"]
"""The reference that a policy is held near, its teacher, and its own moving average, as it was before the step."""
DivergenceKind: TypeAlias = Literal["forward-kl", "reverse-kl", "jsd"]


@attrs.frozen(kw_only=True)
class Divergence:
    """The distance of the policy's distribution p from a frozen model's q, at each decision, whatever was decided.

    Attributes:
        kind: `forward-kl` is KL(q || p), `reverse-kl` is KL(p || q), `jsd` is β KL(q || m) + (1 - β) KL(p || m) with
            m = β q + (1 - β) p (arXiv:2306.13649, equation 1).
        beta: β of `jsd`, in (0, 1).
        top: Of a decision among many outcomes, such as tokens, the outcomes that q finds likeliest are told apart and
            all others taken as one, which never gives more than the true divergence; None tells all apart.
    """

    kind: DivergenceKind
    beta: float = 0.5
    top: int | None = None


@attrs.frozen(kw_only=True)
class Blend:
    """The errors of blends of the policy's prediction with another model's, of decisions that are regressions.

    A blend is c v + (1 - c) v_other of velocities, and so of the x_0 they stand for (arXiv:2509.16117, equations 5, 6).

    Attributes:
        shares: c of each blend.
    """

    shares: tuple[float, ...]


Comparison: TypeAlias = Divergence | Blend


@attrs.frozen(kw_only=True, eq=False)
class Blended:
    """Errors of blends, each a mean over what is not given of the sample.

    Attributes:
        squared_NK: float32, of the x_0 that the blend predicts; carries the gradient.
        absolute_NK: float32, likewise of the absolute error; detached.
    """

    squared_NK: torch.Tensor
    absolute_NK: torch.Tensor


@attrs.frozen(kw_only=True, eq=False)
class KLTarget:
    """A frozen model's prediction, which a forward of the policy is compared with.

    Attributes:
        prediction: [N, ...] tensors of the frozen model for the same decisions, by names of the model plugin.
        comparison: The distance from it.
    """

    prediction: Mapping[str, torch.Tensor]
    comparison: Comparison


@attrs.frozen(kw_only=True, eq=False)
class FrozenOutput:
    """A frozen model's log-probs of decisions, such as the reference log-probs, and the policy's distance from it.

    Attributes:
        logprobs_N: float32 log-probability of each decision that was taken, at the temperature it was taken at.
        divergence_N: float32, as `Algorithm.consults` asks for it; carries the gradient. None where it does not.
        blended: Likewise.
    """

    logprobs_N: torch.Tensor
    divergence_N: torch.Tensor | None = None
    blended: Blended | None = None
