"""Calls into an algorithm: whatever it raises, or returns of the wrong form, becomes a fault that says where."""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args

import attrs
import torch

from cosmos_core.protocols import Aggregation, Algorithm, Decisions, Loss
from cosmos_core.protocols.algorithm import (
    CORE_METRICS,
    AdvantageEstimator,
    Estimate,
    OldLogprobs,
    Taken,
    is_core_metric,
)
from cosmos_core.protocols.frozen import Blend, Comparison, Divergence, FrozenRole
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Group

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
            fault(f"{name} is {values[name]!r}; it must be one of {', '.join(map(repr, choices))}")
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


def summarised(algorithm: AdvantageEstimator, sequences: Sequence[Taken]) -> dict[int, list[float]]:
    """The numbers that the algorithm tells others of each sequence, by its place."""
    with calling("summarise"):
        said = {taken.place: [*map(float, algorithm.summarise(taken))] for taken in sequences}
    if len({len(numbers) for numbers in said.values()}) > 1:
        fault(f"summarise gave {sorted({len(each) for each in said.values()})} numbers; give as many for each sequence")
    return said


def settled(
    algorithm: AdvantageEstimator, said: Mapping[int, Sequence[float]], sequences: Sequence[Taken]
) -> list[Estimate]:
    """Estimates of sequences, one after another, of a batch in which this was said."""
    with calling("settle"):
        estimate: object = algorithm.settle(said)
    if not callable(estimate):
        fault(f"settle returned a {type(estimate).__name__}; return a function that gives an Estimate for a Taken")
    with calling("what settle gave"):
        found = [estimate(taken) for taken in sequences]
    for each, taken in zip(found, sequences, strict=True):
        _expect_estimate(each, taken)
    if 0 < sum(each.targets_n is None for each in found) < len(found):
        fault("an Estimate has targets_n and another has None; give them for all sequences of a batch or for none")
    return found


def _expect_estimate(estimate: object, taken: Taken) -> None:
    if not isinstance(estimate, Estimate):
        fault(
            f"what settle gave returned a {type(estimate).__name__}; return "
            "cosmos_core.protocols.algorithm.Estimate(advantages_n=...)"
        )
    held = [each for each in (taken.logprobs_n, *taken.frozen_n.values(), taken.values_n) if each is not None]
    number = len([*held, estimate.advantages_n][0])
    for name, values in (("advantages_n", estimate.advantages_n), ("targets_n", estimate.targets_n)):
        if values is not None or name == "advantages_n":
            _expect_one_each(f"an Estimate's {name} is", values, number)
        if values is not None and not values.isfinite().all():
            fault(f"an Estimate has {values[~values.isfinite()][0].item()} in {name}; bound what it is computed from")


def plain(records: Sequence[Any]) -> list[dict[str, Any]]:
    """Records with lists for tensors, to be compared."""
    return [
        attrs.asdict(record, value_serializer=lambda _, __, each: each.tolist() if torch.is_tensor(each) else each)
        for record in records
    ]


def price(algorithm: Algorithm, name: str, decisions: Decisions) -> Loss:
    """One price for each decision, with a gradient, and metrics: by `loss`, or by `imitation`."""
    number, absent = len(decisions.logprobs_N), ""
    if not algorithm.needs_entropy:
        absent += " (entropy_N is None, as needs_entropy is False)"
    if algorithm.old_logprobs == "none":
        absent += " (old_logprobs_N is None, as old_logprobs is 'none')"
    with calling(f"{name}, on {number} decisions{absent},"):
        loss: object = getattr(algorithm, name)(decisions)
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
    with calling(f"advantages, on {len(groups)} groups ({rewards_text(*groups)}),"):
        found: object = algorithm.advantages(groups)
    if not isinstance(found, list) or len(found) != len(groups):
        fault(f"advantages returned {found!r:.200} for {len(groups)} groups; return one list for each group, in order")
    for group, values in zip(groups, found, strict=True):
        if not isinstance(values, list) or len(values) != len(group.samples):
            fault(
                f"advantages gave {values!r:.200} for a group of {len(group.samples)} samples; "
                "return a list with one value for each sample, in order"
            )
        for sample, value in zip(group.samples, values, strict=True):
            where = f"in a group with {rewards_text(group)}"
            if not sample.is_scored and value is not None:
                fault(f"advantages gave {value!r} to an unscored sample {where}; give None: look at sample.is_scored")
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if sample.is_scored and not (is_number and math.isfinite(value)):
                fault(f"advantages gave {value!r} to a scored sample {where}; give a finite float")
    return found


def admitted(algorithm: Algorithm, group: Group) -> str | None:
    """The answer of `admit` about a group."""
    with calling(f"admit, on a group with {rewards_text(group)},"):
        return algorithm.admit(group)


def rewards_text(*groups: Group) -> str:
    """The rewards of groups, for people; None where a sample has none."""
    texts = (
        ", ".join("None" if sample.reward is None else f"{sample.reward:g}" for sample in group.samples)
        for group in groups[:_SHOWN_GROUPS]
    )
    return "rewards " + "; ".join(texts) + ("; …" if len(groups) > _SHOWN_GROUPS else "")
