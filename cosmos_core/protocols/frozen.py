"""Models that an algorithm consults and does not train: a reference, a teacher, the policy's own moving average.

Shape legend: N decisions of a micro-batch, K blends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

import attrs

if TYPE_CHECKING:
    import torch

FrozenRole: TypeAlias = Literal["reference", "teacher", "average"]
"""The reference that a policy is held near, the teacher that it imitates, and the exponential moving average of its own
weights (`[policy.average]`), as it was before the step."""
DivergenceKind: TypeAlias = Literal["forward-kl", "reverse-kl", "jsd"]


@attrs.frozen(kw_only=True)
class Divergence:
    """How far the policy's distribution p is from a frozen model's q, at each decision, whatever was decided.

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
    """How far blends of the policy's prediction with another model's are off, of decisions that are regressions.

    A blend is c v + (1 - c) v_other, with v what the policy predicts, and with it of the sample x_0 that it stands for
    (arXiv:2509.16117, equations 5 and 6).

    Attributes:
        shares: c of each blend.
    """

    shares: tuple[float, ...]


Question: TypeAlias = Divergence | Blend


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
class Outlook:
    """What a frozen model says of decisions besides those that were taken; only model plugins look inside.

    Attributes:
        arrays: [N, ...] each, by names of the model plugin.
    """

    arrays: Mapping[str, torch.Tensor]


@attrs.frozen(kw_only=True, eq=False)
class Against:
    """What a forward of the policy is compared with.

    Attributes:
        outlook: Of the frozen model, for the same decisions.
        question: What of it.
    """

    outlook: Outlook
    question: Question


@attrs.frozen(kw_only=True, eq=False)
class Opinion:
    """What a frozen model says of the decisions of a micro-batch.

    Attributes:
        logprobs_N: float32 log-probability of each decision that was taken, at the temperature it was taken at.
        divergence_N: float32, as `Consulting.consults` asks for it; carries the gradient. None where it does not.
        blended: Likewise.
    """

    logprobs_N: torch.Tensor
    divergence_N: torch.Tensor | None = None
    blended: Blended | None = None


@runtime_checkable
class Consulting(Protocol):
    """An algorithm that prices decisions by what frozen models say of them. Optional, beside `Algorithm`."""

    @property
    def consults(self) -> Mapping[FrozenRole, Question | None]:
        """The models it consults, by role, each with what it needs; None needs log-probs alone.

        A recipe without the table of a role (`[reference]`, `[teacher]`, `[policy.average]`) is refused; one model may
        be asked a question.
        """
        ...
