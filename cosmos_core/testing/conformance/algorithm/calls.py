"""Calls into an algorithm: whatever it raises, or returns of the wrong form, becomes a fault that says where.

Shape legend: N decisions of a micro-batch.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import math
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, get_args

import attrs
import numpy as np
import torch

from cosmos_core.policy.batches.batch import Counts, TrainSequence
from cosmos_core.policy.training.microbatch import Known
from cosmos_core.protocols import Aggregation, Algorithm, AlgorithmCapabilities, Decided, Decisions, Loss
from cosmos_core.protocols.algorithm import AdvantageEstimator, Estimate, OldLogprobs, Taken
from cosmos_core.protocols.frozen import Blend, Comparison, Divergence, FrozenOutput, FrozenRole
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Array, Group, Payload

_SHOWN_GROUPS: Final = 3
_CHOICES: Final[Mapping[str, tuple[object, ...]]] = {
    "aggregation": tuple(Aggregation),
    "old_logprobs": get_args(OldLogprobs),
    "needs_entropy": (False, True),
    "skips_zero_advantage": (False, True),
    "needs_critic": (False, True),
}


@contextlib.contextmanager
def calling(what: str) -> Iterator[None]:
    """Turn an exception of the plugin into a fault that names the exception and the line it came from."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever the plugin raises is the finding
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        fault(f"{what} raised {type(error).__name__}: {error} (at {where}, `{last.line}`)")


def properties_of(algorithm: Algorithm) -> dict[str, object]:
    """The algorithm's properties, each with a value that the trainer knows."""
    with calling("reading the algorithm's properties"):
        values: dict[str, object] = {name: getattr(algorithm, name) for name in (*_CHOICES, "constant_length")}
    for name, choices in _CHOICES.items():
        if not any(type(values[name]) is type(choice) and values[name] == choice for choice in choices):
            fault(f"{name} is {values[name]!r}; it must be one of {', '.join(map(_choice, choices))}")
    length = values["constant_length"]
    if not isinstance(length, int) or length < 1:
        fault(f"constant_length is {length!r}; it must be an integer of at least 1 (1 where it is unused)")
    return values


def consulted(algorithm: Algorithm) -> Mapping[FrozenRole, Comparison | None]:
    """The frozen models that the algorithm consults, at most one of which the policy is compared with."""
    with calling("reading consults"):
        asked: object = algorithm.consults
    roles = get_args(FrozenRole)
    if (
        not isinstance(asked, Mapping)
        or not asked.keys() <= {*roles}
        or not all(value is None or isinstance(value, Divergence | Blend) for value in asked.values())
        or sum(value is not None for value in asked.values()) > 1
    ):
        fault(
            f"consults is {asked!r}; give a mapping with keys among {', '.join(map(repr, roles))} whose values are "
            "None, a Divergence or a Blend, at most one of these"
        )
    return asked


def estimates_of(algorithm: AdvantageEstimator, sequences: Sequence[Taken]) -> list[Estimate]:
    """Estimates of each sequence of a batch, from what the algorithm says of all of them."""
    with calling("summarise"):
        said = {taken.place: [*map(float, algorithm.summarise(taken))] for taken in sequences}
    if len({len(numbers) for numbers in said.values()}) > 1:
        fault(f"summarise gave {sorted({len(each) for each in said.values()})} numbers; give as many for each sequence")
    estimates = settled(algorithm, said, sequences)
    if 0 < sum(each.targets_n is None for each in estimates) < len(estimates):
        fault("an Estimate has targets_n and another has None; give them for all sequences of a batch or for none")
    return estimates


def settled(
    algorithm: AdvantageEstimator, said: Mapping[int, Sequence[float]], sequences: Sequence[Taken]
) -> list[Estimate]:
    """Estimates of sequences, one after another, of a batch in which this was said."""
    with calling("settle"):
        estimate: object = algorithm.settle(said)
    if not callable(estimate):
        fault(f"settle returned a {type(estimate).__name__}; return a function that gives an Estimate for a Taken")
    with calling("what settle gave"):
        found: list[object] = [estimate(taken) for taken in sequences]
    return [_expect_estimate(each, taken) for each, taken in zip(found, sequences, strict=True)]


def priced(
    algorithm: Algorithm,
    decided: Decided,
    known: Known,
    old_logprobs_N: torch.Tensor | None,
    frozen: Mapping[FrozenRole, FrozenOutput],
) -> Loss:
    """Price a micro-batch as the trainer does: one float32 price for each decision, with a gradient."""
    return _priced("loss", algorithm, known.decisions(decided, old_logprobs_N, frozen))


def priced_imitation(algorithm: Algorithm, decided: Decided, known: Known) -> Loss:
    """Price a micro-batch of demonstrations that are imitated beside rollouts."""
    return _priced("imitation", algorithm, known.decisions(decided))


def _priced(name: str, algorithm: Algorithm, decisions: Decisions) -> Loss:
    number = len(decisions.logprobs_N)
    with calling(f"{name}, on {number} decisions{_absent(algorithm)},"):
        loss: object = getattr(algorithm, name)(decisions)
    if not isinstance(loss, Loss):
        fault(f"{name} returned a {type(loss).__name__}; return cosmos_core.protocols.Loss(loss_N=...)")
    seen: object = loss.loss_N
    if not isinstance(seen, torch.Tensor) or seen.shape != (number,) or seen.dtype != torch.float32:
        fault(
            f"{name} gave {described(seen)} for {number} decisions; loss_N is one float32 price for each: "
            "neither sum nor average them, the trainer weighs them by `aggregation`"
        )
    if not loss.loss_N.requires_grad:
        fault(
            "loss_N carries no gradient, so nothing would be learnt; compute it from decisions.logprobs_N "
            "without detach() or torch.no_grad()"
        )
    return loss


def advantages_of(algorithm: Algorithm, groups: Sequence[Group]) -> list[list[float | None]]:
    """The advantages of a batch: for each group as many values as it has samples."""
    with calling(f"advantages, on {len(groups)} groups ({rewards_text(groups)}),"):
        found: object = algorithm.advantages(groups)
    if not isinstance(found, list) or len(found) != len(groups):
        fault(f"advantages returned {found!r:.200} for {len(groups)} groups; return one list for each group, in order")
    for group, values in zip(groups, found, strict=True):
        if not isinstance(values, list) or len(values) != len(group.samples):
            fault(
                f"advantages gave {values!r:.200} for a group of {len(group.samples)} samples; "
                "return a list with one value for each sample, in order"
            )
    return found


def expect_advantages(algorithm: Algorithm, groups: Sequence[Group]) -> list[list[float | None]]:
    """Advantages, all of which are finite numbers for scored samples and None for others."""
    found = advantages_of(algorithm, groups)
    for group, values in zip(groups, found, strict=True):
        where = f"in a group with {rewards_text([group])}"
        for sample, value in zip(group.samples, values, strict=True):
            if not sample.is_scored and value is not None:
                fault(f"advantages gave {value!r} to an unscored sample {where}; give None")
            if sample.is_scored and not _is_finite(value):
                fault(f"advantages gave {value!r} to a scored sample {where}; give a finite float")
    return found


def admitted(algorithm: Algorithm, group: Group) -> str | None:
    """The answer of `admit` about a group."""
    with calling(f"admit, on a group with {rewards_text([group])},"):
        return algorithm.admit(group)


def rewards_text(groups: Sequence[Group]) -> str:
    """The rewards of groups, for people; None where a sample has none."""
    texts = (
        ", ".join("None" if sample.reward is None else f"{sample.reward:g}" for sample in group.samples)
        for group in groups[:_SHOWN_GROUPS]
    )
    return "rewards " + "; ".join(texts) + ("; …" if len(groups) > _SHOWN_GROUPS else "")


def described(value: object) -> str:
    """A value's form, for people."""
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"


def _expect_estimate(estimate: object, taken: Taken) -> Estimate:
    """Fault an estimate that is none, or does not fit its sequence."""
    if not isinstance(estimate, Estimate):
        fault(
            f"what settle gave returned a {type(estimate).__name__}; return "
            "cosmos_core.protocols.algorithm.Estimate(advantages_n=...)"
        )
    held = (taken.logprobs_n, *taken.frozen_n.values(), taken.values_n)
    known = next((each for each in held if each is not None), None)
    number = len(estimate.advantages_n) if known is None else len(known)
    for name, values in (("advantages_n", estimate.advantages_n), ("targets_n", estimate.targets_n)):
        if name == "targets_n" and values is None:
            continue
        if not isinstance(values, torch.Tensor) or values.dtype != torch.float32 or values.shape != (number,):
            fault(f"an Estimate has {described(values)} as {name} of {number} decisions; give one float32 for each")
        if not values.isfinite().all():
            fault(f"an Estimate has {values[~values.isfinite()][0].item()} in {name}; bound what it is computed from")
    return estimate


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _choice(value: object) -> str:
    return f"{type(value).__name__}.{value.name}" if isinstance(value, enum.Enum) else repr(value)


def _absent(algorithm: Algorithm) -> str:
    """Fields that the decisions lack because the algorithm did not ask for it."""
    absent = []
    if not algorithm.needs_entropy:
        absent.append("entropy_N is None, as needs_entropy is False")
    if algorithm.old_logprobs == "none":
        absent.append("old_logprobs_N is None, as old_logprobs is 'none'")
    return f" ({'; '.join(absent)})" if absent else ""


_STRENGTHS: Final = {
    "rollouts": (1.0, -0.5, 0.25, -1.5, 0.75, -0.125),
    "demonstrations": (1.0,),
    "preferences": (1.0, -1.0),
}

EXTREME_LOGPROBS: Final = (0.0, -1e-3, -30.0, -100.0)
"""exp() of a float32 overflows at 88.7; a decision may become that unlikely, or have been."""


@attrs.frozen(kw_only=True, eq=False)
class Batch:
    """Everything that a step trains on, and what a model would say of it.

    Attributes:
        lengths: Decisions of each sequence.
        advantages: Of each sequence.
        logprobs_N: float32, under the current weights.
        old_logprobs_N: float32, under the weights at the start of the step.
        behaviour_logprobs_N: float32, under the weights that generated; None for demonstrations.
        entropy_N: float32.
        frozen_N: float32, under frozen models, by role.
        values_N: float32, what a critic makes of them.
        payload_kind: Kind of the payloads.
        strength: What advantages are multiplied by once they are all known.
    """

    lengths: tuple[int, ...]
    advantages: tuple[float, ...]
    logprobs_N: torch.Tensor
    old_logprobs_N: torch.Tensor
    behaviour_logprobs_N: torch.Tensor | None
    entropy_N: torch.Tensor
    frozen_N: Mapping[FrozenRole, torch.Tensor]
    values_N: torch.Tensor
    payload_kind: str
    strength: float = 1.0

    def advantages_of_decisions(self) -> torch.Tensor:
        """float32 [N], each sequence's advantage at each of its decisions."""
        return torch.tensor(self.advantages).repeat_interleave(torch.tensor(self.lengths))

    def decisions_of(self, sequence: int) -> range:
        """Where the decisions of a sequence lie."""
        start = sum(self.lengths[:sequence])
        return range(start, start + self.lengths[sequence])

    def sequence(self, index: int) -> TrainSequence:
        """A sequence as it comes from a rollout replica, or from the dataset."""
        arrays = {}
        if self.behaviour_logprobs_N is not None:
            values = self.behaviour_logprobs_N[self.decisions_of(index)].numpy()
            versions = np.zeros(self.lengths[index], dtype=np.int32)
            arrays = {"logprobs": _array(values), "versions": _array(versions)}
        payload = Payload(kind=self.payload_kind, arrays=arrays)
        return TrainSequence(payload=payload, advantage=self.advantages[index], place=index)

    def taken(self, index: int, algorithm: Algorithm) -> Taken:
        """The sequence as it is known before the step, as an algorithm that estimates advantages is told."""
        places = torch.tensor(self.decisions_of(index))
        behaviour_N = self.behaviour_logprobs_N
        old_N = {"none": None, "behaviour": behaviour_N, "recompute": self.old_logprobs_N}[algorithm.old_logprobs]
        return Taken(
            place=index,
            advantage=self.advantages[index],
            logprobs_n=None if old_N is None else old_N[places],
            frozen_n={role: self.frozen_N[role][places] for role in consulted(algorithm)},
            values_n=self.values_N[places] if is_judged(algorithm) else None,
        )

    def counts(self) -> Counts:
        """Counts of the whole batch."""
        return Counts(sequences=len(self.lengths), decisions=sum(self.lengths), trained=len(self.lengths))


def draw(
    capabilities: AlgorithmCapabilities,
    *,
    lengths: Sequence[int] = (5, 1, 3, 7, 2, 4),
    drift: float = 0.05,
    seed: int = 0,
) -> Batch:
    """A batch of random log-probs.

    Args:
        capabilities: Of the algorithm: what its sequences are.
        lengths: Decisions of each sequence.
        drift: How far old log-probs lie from the current ones, and those of the behaviour policy from these; 0 is
            on-policy.
        seed: Of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    number = sum(lengths)
    is_generated = capabilities.source == "rollouts"

    def noise() -> torch.Tensor:
        return torch.randn(number, generator=generator)

    logprobs_N = -noise().abs() - 0.1
    old_logprobs_N = logprobs_N + drift * noise()
    behaviour_logprobs_N = old_logprobs_N + drift * noise()
    strengths = itertools.cycle(_STRENGTHS[capabilities.source])
    entropy_N = noise().abs() + 0.1
    return Batch(
        lengths=tuple(lengths),
        advantages=tuple(next(strengths) for _ in lengths),
        logprobs_N=logprobs_N,
        old_logprobs_N=old_logprobs_N,
        behaviour_logprobs_N=behaviour_logprobs_N if is_generated else None,
        entropy_N=entropy_N,
        # However near to on-policy: a frozen model is another one.
        frozen_N={role: logprobs_N + 0.3 * noise() for role in get_args(FrozenRole)},
        values_N=noise(),
        payload_kind=min(capabilities.payload_kinds, default="tokens"),
    )


def extreme(capabilities: AlgorithmCapabilities, *, advantages: Sequence[float]) -> Batch:
    """A batch with a sequence of each advantage; the decisions of each are far from what made them, in every way."""
    triples_N3 = torch.tensor(list(itertools.product(EXTREME_LOGPROBS, repeat=3)))
    logprobs_N, old_logprobs_N, behaviour_logprobs_N = triples_N3.repeat(len(advantages), 1).unbind(1)
    return Batch(
        lengths=(len(triples_N3),) * len(advantages),
        advantages=tuple(advantages),
        logprobs_N=logprobs_N.contiguous(),
        old_logprobs_N=old_logprobs_N.contiguous(),
        behaviour_logprobs_N=behaviour_logprobs_N.contiguous() if capabilities.source == "rollouts" else None,
        entropy_N=logprobs_N.abs(),
        frozen_N={
            "reference": old_logprobs_N.contiguous(),
            "teacher": behaviour_logprobs_N.contiguous(),
            "average": old_logprobs_N.contiguous(),
        },
        values_N=torch.zeros_like(logprobs_N),
        payload_kind=min(capabilities.payload_kinds, default="tokens"),
    )


def is_judged(algorithm: Algorithm) -> bool:
    """True if the algorithm needs a critic."""
    return algorithm.needs_critic


def _array(values: np.ndarray) -> Array:
    return Array(dtype=str(values.dtype), shape=values.shape, data=values.tobytes())
