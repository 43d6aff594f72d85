"""Asks an algorithm all that the trainer does, on a batch made of numbers, and faults every answer that is wrong.

Decisions are laid out, estimates settled and decisions weighed by the trainer's own code, for any micro-batches.

Shape legend: N decisions of the whole batch or of a micro-batch.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, get_args

import attrs
import numpy as np
import torch

from cosmos_core.models.tokens import array_of
from cosmos_core.policy.batches.batch import Counts, TrainSequence
from cosmos_core.policy.processes.world import single_world
from cosmos_core.policy.training.microbatch import Prepared, know
from cosmos_core.policy.training.old_logprobs import Evaluated, comparison_of, with_estimates
from cosmos_core.protocols import Aggregation, Algorithm, AlgorithmCapabilities, Decided, Decisions, Loss, MicroBatch
from cosmos_core.protocols.algorithm import CORE_METRICS, AdvantageEstimator, OldLogprobs, is_core_metric
from cosmos_core.protocols.frozen import Blend, Blended, Comparison, Divergence, FrozenRole
from cosmos_core.protocols.model import Span
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Array, Group, Payload

_LENGTHS: Final = (5, 1, 3, 7, 2, 4)
_ADVANTAGES: Final = {
    "rollouts": (1.0, -0.5, 0.25, -1.5, 0.75, -0.125),
    "demonstrations": (1.0,) * 6,
    "preferences": (1.0, -1.0) * 3,
}
_EXTREME_LOGPROBS: Final = (0.0, -1e-3, -30.0, -100.0)
"""exp() of a float32 overflows at 88.7; a decision may become that unlikely, or have been."""
_EXTREME_ADVANTAGES: Final = {**_ADVANTAGES, "rollouts": (0.0, 1.0, -1.0, 1e-6, 1e3, -1e3)}
_LEAST_ERROR: Final = 1e-2
"""Of a regression: nothing is learned from one that is met exactly."""
_SHOWN_GROUPS: Final = 3
_CHOICES: Final[Mapping[str, tuple[object, ...]]] = {
    "aggregation": tuple(Aggregation),
    "old_logprobs": get_args(OldLogprobs),
    "needs_entropy": (False, True),
    "skips_zero_advantage": (False, True),
    "needs_critic": (False, True),
}
_SMALLEST: Final = {"constant_length": 1, "num_demonstrations": 0}


@attrs.frozen(kw_only=True, eq=False)
class Batch:
    """Everything that a step trains on, and what a model would say of it; tensors are float32.

    Attributes:
        lengths: Decisions of each sequence.
        advantages: Of each sequence.
        logprobs_N: Under the current weights.
        old_logprobs_N: Under the weights at the start of the step.
        behaviour_logprobs_N: Under the weights that generated; None for demonstrations.
        entropy_N: Of each decision.
        frozen_N: Log-probs under frozen models, by role.
        values_N: A critic's.
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
    strength: float = 1.0

    @property
    def whole(self) -> MicroBatch:
        """All of it in one micro-batch."""
        return self.cut(range(len(self.lengths)))

    def cut(self, sequences: Iterable[int], part: slice = slice(None)) -> MicroBatch:
        """A micro-batch of some sequences, or of a part of each."""
        starts = [0, *itertools.accumulate(self.lengths)]
        held = {index: taken for index in sequences if (taken := range(self.lengths[index])[part])}
        return MicroBatch(
            sequences=tuple(held),
            num_decisions=tuple(map(len, held.values())),
            num_units=sum(map(len, held.values())),
            inputs={"places": torch.tensor([starts[index] + each for index, taken in held.items() for each in taken])},
            spans=tuple(Span(first=taken[0], total=self.lengths[index]) for index, taken in held.items()),
        )

    def sequences(self) -> list[TrainSequence]:
        """The sequences of the batch, as the trainer reads them."""
        payloads = [Payload(kind="numbers", arrays={}) for _ in self.lengths]
        if self.behaviour_logprobs_N is not None:
            parts = torch.split(self.behaviour_logprobs_N, [*self.lengths])
            payloads = [
                Payload(kind="numbers", arrays={"logprobs": array_of(part.numpy()), **_turns(len(part))})
                for part in parts
            ]
        told = zip(payloads, self.advantages, strict=True)
        return [TrainSequence(payload=each, advantage=own, place=place) for place, (each, own) in enumerate(told)]


def _turns(number: int) -> dict[str, Array]:
    """Two turns of a dialogue, the first of one decision and rewarded by itself; of fewer decisions none."""
    sizes, rewards = np.asarray([1, number - 1], np.int32), np.asarray([0.25, 0.0])
    return {"turns": array_of(sizes), "turn_rewards": array_of(rewards)} if number > 1 else {}


@attrs.frozen(kw_only=True, eq=False)
class Priced:
    """The decisions of a micro-batch that were priced; `places_N` are theirs in the batch."""

    decisions: Decisions
    loss: Loss
    weights_N: torch.Tensor
    places_N: torch.Tensor

    def gradient(self, weights_N: torch.Tensor | None = None) -> torch.Tensor:
        """The gradient of the sum of prices, weighed if asked for, with respect to each decision's log-prob."""
        loss_N = self.loss.loss_N
        weights_N = torch.ones_like(loss_N) if weights_N is None else weights_N
        (gradient_N,) = torch.autograd.grad(
            loss_N, self.decisions.logprobs_N, weights_N, retain_graph=True, materialize_grads=True
        )
        return gradient_N

    def situation(self, place: int) -> str:
        """A decision in words, for people."""
        values = {
            "advantage": self.decisions.advantages_N,
            "log-prob": self.decisions.logprobs_N,
            "old log-prob": self.decisions.old_logprobs_N,
            "behaviour log-prob": self.decisions.behaviour_logprobs_N,
            **{f"{role} log-prob": output.logprobs_N for role, output in self.decisions.frozen.items()},
        }
        return ", ".join(f"{name} {all_N[place].item():g}" for name, all_N in values.items() if all_N is not None)


def draw(capabilities: AlgorithmCapabilities, *, drift: float = 0.05) -> Batch:
    """A batch of six sequences with random log-probs.

    Args:
        capabilities: Of the algorithm: what its sequences are.
        drift: How far old log-probs lie from the current ones, and those of the behaviour policy from these; 0 is
            on-policy.
    """
    generator = torch.Generator().manual_seed(0)

    def noise() -> torch.Tensor:
        return torch.randn(sum(_LENGTHS), generator=generator)

    logprobs_N = -noise().abs() - 0.1
    old_N = logprobs_N + drift * noise()
    behaviour_N = old_N + drift * noise()
    return Batch(
        lengths=_LENGTHS,
        advantages=_ADVANTAGES[capabilities.source],
        logprobs_N=logprobs_N,
        old_logprobs_N=old_N,
        behaviour_logprobs_N=behaviour_N if capabilities.source == "rollouts" else None,
        entropy_N=noise().abs() + 0.1,
        # However near to on-policy: a frozen model is another one.
        frozen_N={role: logprobs_N + 0.3 * noise() for role in get_args(FrozenRole)},
        values_N=noise(),
    )


def extreme(capabilities: AlgorithmCapabilities, advantages: Sequence[float] = ()) -> Batch:
    """A batch with a sequence of each advantage; the decisions of each are far from what made them, in every way."""
    advantages = advantages or _EXTREME_ADVANTAGES[capabilities.source]
    triples_N3 = torch.tensor(list(itertools.product(_EXTREME_LOGPROBS, repeat=3)))
    logprobs_N, old_N, other_N = triples_N3.repeat(len(advantages), 1).T.contiguous()
    return Batch(
        lengths=(len(triples_N3),) * len(advantages),
        advantages=tuple(advantages),
        logprobs_N=logprobs_N,
        old_logprobs_N=old_N,
        behaviour_logprobs_N=other_N if capabilities.source == "rollouts" else None,
        entropy_N=logprobs_N.abs(),
        frozen_N={"reference": old_N, "teacher": other_N, "average": old_N},
        values_N=torch.zeros_like(logprobs_N),
    )


def laid(algorithm: Algorithm, batch: Batch, micro_batches: Sequence[MicroBatch]) -> Evaluated:
    """Return all that the trainer knows of micro-batches before the first backward, but the algorithm's estimates."""
    sequences, places = batch.sequences(), [each.inputs["places"] for each in micro_batches]
    totals = Counts(sequences=len(sequences), decisions=len(batch.logprobs_N))
    known = [know(algorithm, each, sequences, totals) for each in micro_batches]

    def said(logprobs_N: torch.Tensor) -> list[Decided]:
        values_N = batch.values_N if algorithm.needs_critic else None
        return [
            Decided(logprobs_N=logprobs_N[at], entropy_N=None, values_N=None if values_N is None else values_N[at])
            for at in places
        ]

    return Evaluated(
        prepared=Prepared(
            batches=micro_batches,
            sequences=sequences,
            known=known,
            weights=[each.weights_N for each in known],
            num_real=len(micro_batches),
            temperature=1.0,
        ),
        old=said(batch.old_logprobs_N),
        frozen={role: said(batch.frozen_N[role]) for role in consulted(algorithm)},
        compared=comparison_of(algorithm),
    )


def estimated(
    algorithm: AdvantageEstimator, part: Evaluated, exchange: Callable[[bytes], list[bytes]] = lambda own: [own]
) -> Evaluated:
    """The same with what the algorithm estimates; `exchange` gives what all replicas summarised."""
    group: Any = SimpleNamespace(exchange=exchange)
    with calling("summarise, settle or what it gave, which must be a function that gives an Estimate for a Taken,"):
        ((found,), _) = with_estimates(algorithm, [part], single_world(), group)
    return found


def priced(
    algorithm: Algorithm, batch: Batch, *micro_batches: MicroBatch, is_imitated: bool = False
) -> tuple[Priced, ...]:
    """Price micro-batches, or all in one, as the trainer does: as rollouts, or as demonstrations beside them."""
    micro_batches = micro_batches or (batch.whole,)
    if is_imitated:
        batch = attrs.evolve(batch, advantages=(1.0,) * len(batch.lengths), behaviour_logprobs_N=None)
    part = laid(algorithm, batch, micro_batches)
    if isinstance(algorithm, AdvantageEstimator) and not is_imitated:
        part = estimated(algorithm, part)
    found = []
    for index, (micro_batch, known) in enumerate(zip(micro_batches, part.prepared.known, strict=True)):
        places_N = micro_batch.inputs["places"]
        decided = _decided(algorithm, batch, places_N)
        if is_imitated:
            decisions, name = known.decisions(attrs.evolve(decided, values_N=None)), "imitation"
        else:
            old_N, frozen = part.old_logprobs(algorithm, index), part.outputs(index, decided)
            decisions, name = known.decisions(decided, old_N, frozen), "loss"
        decisions = attrs.evolve(decisions, advantages_N=decisions.advantages_N * batch.strength)
        loss = price(algorithm, name, decisions)
        found.append(Priced(decisions=decisions, loss=loss, weights_N=known.weights_N, places_N=places_N))
    return tuple(found)


def trained(
    algorithm: Algorithm, batch: Batch, micro_batches: Iterable[MicroBatch], *, is_imitated: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each decision's part of the loss (float64), and the gradient of the loss by its log-prob, of a step."""
    # In float64, so that nothing but the prices themselves can differ.
    terms_N, gradient_N = torch.zeros_like(batch.logprobs_N).double(), torch.zeros_like(batch.logprobs_N)
    for part in priced(algorithm, batch, *micro_batches, is_imitated=is_imitated):
        terms_N[part.places_N] = part.loss.loss_N.detach().double() * part.weights_N
        gradient_N[part.places_N] = part.gradient(part.weights_N)
    return terms_N, gradient_N


def _decided(algorithm: Algorithm, batch: Batch, places_N: torch.Tensor) -> Decided:
    """The answer of a forward for the decisions at some places."""
    logprobs_N = batch.logprobs_N[places_N].requires_grad_()
    beside: dict[str, Any] = {}
    if (compared := comparison_of(algorithm)) is not None:
        beside = comparison(compared[1], logprobs_N, batch.frozen_N[compared[0]][places_N])
    return Decided(
        logprobs_N=logprobs_N,
        entropy_N=batch.entropy_N[places_N] if algorithm.needs_entropy else None,
        values_N=batch.values_N[places_N].requires_grad_() if algorithm.needs_critic else None,
        **beside,
    )


def comparison(asked: Comparison | None, logprobs_N: torch.Tensor, other_N: torch.Tensor) -> dict[str, Any]:
    """A stand-in for the divergence or the blends that are asked for, by its field, which carries a gradient."""
    apart_N = logprobs_N - other_N
    if isinstance(asked, Divergence):
        return {"divergence_N": apart_N.clamp(-20.0, 20.0).square() / 2.0}
    if not isinstance(asked, Blend):
        return {}
    # Of regressions of one number each: an error is the root of minus the log-prob, the other model's near it.
    error_N1 = (-logprobs_N).clamp_min(_LEAST_ERROR**2).sqrt()[:, None]
    near_N1 = (error_N1 * (-0.1 * apart_N.clamp(-5.0, 5.0)).exp()[:, None]).detach()
    shares_K = logprobs_N.new_tensor(asked.shares)
    errors_NK = shares_K * error_N1 + (1.0 - shares_K) * near_N1
    return {"blended": Blended(squared_NK=errors_NK.square(), absolute_NK=errors_NK.detach().abs())}


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
        values = {name: getattr(algorithm, name) for name in (*_CHOICES, *_SMALLEST)}
    for name, choices in _CHOICES.items():
        if not any(type(values[name]) is type(choice) and values[name] == choice for choice in choices):
            fault(f"{name} is {values[name]!r}; it must be one of {', '.join(map(repr, choices))}")
    for name, smallest in _SMALLEST.items():
        if type(values[name]) is not int or values[name] < smallest:
            fault(f"{name} is {values[name]!r}; it must be an integer of at least {smallest}")
    return {**values, "consults": consulted(algorithm)}


def consulted(algorithm: Algorithm) -> dict[FrozenRole, Comparison | None]:
    """The frozen models that the algorithm consults, at most one of which the policy is compared with."""
    with calling("reading consults"):
        asked: Any = algorithm.consults
        comparison_of(algorithm)
    roles = get_args(FrozenRole)
    if not asked.keys() <= {*roles} or not all(isinstance(each, Divergence | Blend | None) for each in asked.values()):
        fault(
            f"consults is {asked!r}; give a mapping with keys among {', '.join(map(repr, roles))} whose values are "
            "None, a Divergence or a Blend"
        )
    return dict(asked)


def plain(record: Any) -> dict[str, str]:
    """The fields of a record as text, to be compared: what is no number equals itself there."""
    fields = attrs.asdict(record, value_serializer=lambda _, __, each: each.tolist() if torch.is_tensor(each) else each)
    return {name: repr(value) for name, value in fields.items()}


def price(algorithm: Algorithm, name: str, decisions: Decisions) -> Loss:
    """One price for each decision, with a gradient, and metrics: by `loss`, or by `imitation`."""
    number, absent = len(decisions.logprobs_N), ""
    if not algorithm.needs_entropy:
        absent += " (entropy_N is None, as needs_entropy is False)"
    if algorithm.old_logprobs == "none":
        absent += " (old_logprobs_N is None, as old_logprobs is 'none')"
    before = plain(decisions)
    with calling(f"{name}, on {number} decisions{absent},"):
        loss: object = getattr(algorithm, name)(decisions)
    after = plain(decisions)
    if changed := [field for field in before if before[field] != after[field]]:
        fault(f"{name} changed decisions.{', '.join(changed)} in place; work on a copy (no method that ends in _)")
    if not isinstance(loss, Loss):
        fault(f"{name} returned a {type(loss).__name__}; return cosmos_core.protocols.Loss(loss_N=...)")
    _expect_one_each(f"{name} gave", loss.loss_N, number)
    if not loss.loss_N.requires_grad:
        fault("loss_N carries no gradient, so nothing would be learnt; compute it from decisions.logprobs_N undetached")
    for metric, value in loss.metrics.items():
        if is_core_metric(metric):
            own = ", ".join(sorted(CORE_METRICS))
            fault(f"the metric {metric!r} has a name of the core's own ({own}, and all that end in _s); rename it")
        _expect_one_each(f"the metric {metric!r} is", value, number)
        if value.requires_grad:
            fault(f"the metric {metric!r} carries a gradient, and so keeps the step's memory; detach it")
    return loss


def _expect_one_each(what: str, values: object, number: int) -> None:
    """Fault values that are not one float32 for each of a number of decisions."""
    form = f"a {type(values).__name__}"
    if isinstance(values, torch.Tensor):
        if values.shape == (number,) and values.dtype == torch.float32:
            return
        form = f"a {str(values.dtype).removeprefix('torch.')} tensor of shape {list(values.shape)}"
    advice = "neither sum nor average them, the trainer weighs them by `aggregation`"
    fault(f"{what} {form} for {number} decisions; give one float32 for each: {advice}")


def advantages_of(algorithm: Algorithm, groups: Sequence[Group]) -> list[list[float | None]]:
    """The advantages of a batch, for each sample of each group: a finite number if it is scored, else None."""
    with _reading(f"advantages, on {len(groups)} groups", *groups):
        found: object = algorithm.advantages(groups)
    if not isinstance(found, list) or [len(each) for each in found] != [len(group.samples) for group in groups]:
        fault(
            f"advantages returned {found!r:.200} for {len(groups)} groups of {len(groups[0].samples)} samples; return "
            "one list for each group, with one value for each sample, in order"
        )
    for group, values in zip(groups, found, strict=True):
        for sample, value in zip(group.samples, values, strict=True):
            where = f"in a group with {rewards_text(group)}"
            if not sample.is_scored and value is not None:
                fault(f"advantages gave {value!r} to an unscored sample {where}; give None: look at sample.is_scored")
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if sample.is_scored and not (is_number and math.isfinite(value)):
                fault(f"advantages gave {value!r} to a scored sample {where}; give a finite float")
    return found


def admitted(algorithm: Algorithm, group: Group) -> str | None:
    """The answer of `admit` about a group: None, or a reason."""
    with _reading("admit, on a group", group):
        answer: object = algorithm.admit(group)
    if answer is not None and not (isinstance(answer, str) and answer):
        fault(
            f"admit returned {answer!r} for a group with {rewards_text(group)}; return None to train on it, or a short "
            "reason to drop it, such as 'equal rewards'"
        )
    return answer


@contextlib.contextmanager
def _reading(what: str, *groups: Group) -> Iterator[None]:
    before = copy.deepcopy(groups)
    with calling(f"{what} with {rewards_text(*groups)},"):
        yield
    if groups != before:
        fault(f"{what} with {rewards_text(*before)}, changed what it was given; work on a copy")


def rewards_text(*groups: Group) -> str:
    """The rewards of groups, for people; None where a sample has none."""
    texts = (
        ", ".join("None" if sample.reward is None else f"{sample.reward:g}" for sample in group.samples)
        for group in groups[:_SHOWN_GROUPS]
    )
    return "rewards " + "; ".join(texts) + ("; …" if len(groups) > _SHOWN_GROUPS else "")
