"""Micro-batches of decisions, each of which is one forward of the transformer, and their scores from velocities.

A transition and a regression are both a point (x_t, t) at which the velocity is asked for, and a target that it is
compared with, so that micro-batches hold either: of a transition the target is x', of a regression e - x_0.

Scores are means over the dims that are decided, all but those of given frames, so that numbers do not grow with the
size of a video. A regression counts as normal around its velocity with variance 1/2: then its log-probability is, up
to a constant, the negative squared error that is given for it.

Source of regressions: flow matching (arXiv:2210.02747); logit-normal times and their shift (arXiv:2403.03206, section
3.1 and equation 23); log-normal noise levels (arXiv:2206.00364, table 1), t = σ / (1 + σ). Of scores: FlowGRPO
(arXiv:2505.05470, equations 9 to 12); DiffusionNFT (arXiv:2509.16117, equations 5 and 6).

Shape legend: N decisions of a micro-batch, S sequences of it, C channels, T latent frames, H and W latent height and
width, K blends.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import attrs
import torch

from cosmos_core.errors import DataError, TrainingError
from cosmos_core.models.diffusion.arrays import Conditions, side_by_side, tensor_of
from cosmos_core.models.diffusion.options import DiffusionOptions
from cosmos_core.protocols import Decided, MicroBatch
from cosmos_core.protocols.frozen import Blend, Blended, Comparison, Divergence, KLTarget
from cosmos_core.protocols.model import Span
from cosmos_core.types import Payload

CONDITION: Final = "condition."
"""Of names of inputs that condition, [S, ...] each; the rest are of decisions, [N, ...]."""
_OF_DECISIONS: Final = frozenset(
    {"guidance", "logprobs", "noise_seed", "offsets", "places", "sample", "states", "steps", "times", "versions"}
)
"""Arrays of a payload that its conditioning does not depend on (see `cosmos_core.types.Payload`)."""


@attrs.frozen(kw_only=True, eq=False)
class Trajectory:
    """The decisions of a payload.

    Attributes:
        num_decisions: All of them.
        is_given_T: bool, frames that are no part of any decision.
        guidance: Of the velocities.
        at: Gives the inputs of some decisions.
    """

    num_decisions: int
    is_given_T: torch.Tensor
    guidance: float
    at: Callable[[slice], dict[str, torch.Tensor]]


def trajectory_of(payload: Payload, shape: tuple[int, int, int, int], neutral_guidance: float) -> Trajectory:
    """The decisions of a payload of latents of this shape, transitions or regressions.

    Raises:
        DataError: It has no decisions of either kind, or its arrays do not fit together.
    """
    times_N = tensor_of(payload, "times", torch.float32, (None,))
    if not bool(((times_N >= 0) & (times_N <= 1)).all()):
        raise DataError(f"times from {float(times_N.min()):g} to {float(times_N.max()):g}; they lie in [0, 1]")
    is_given_T = torch.zeros(shape[1], dtype=torch.bool)
    if "is_given" in payload.arrays:
        is_given_T = tensor_of(payload, "is_given", torch.bool, (shape[1],))
    guidance = neutral_guidance
    if "guidance" in payload.arrays:
        guidance = float(tensor_of(payload, "guidance", torch.float32, ()))
    if "states" in payload.arrays:
        at = _transitions(payload, shape, times_N)
    elif "noise_seed" in payload.arrays:
        at = _regressions(payload, shape, times_N, is_given_T)
    else:
        raise DataError(
            "a payload of latents with neither `states` (transitions) nor `noise_seed` (regressions) has no decisions; "
            "demonstrations go through `noised` first"
        )
    return Trajectory(num_decisions=len(times_N), is_given_T=is_given_T, guidance=guidance, at=at)


def _transitions(
    payload: Payload, shape: tuple[int, int, int, int], times_N: torch.Tensor
) -> Callable[[slice], dict[str, torch.Tensor]]:
    number = len(times_N)
    states_M = tensor_of(payload, "states", torch.float32, (None, *shape))
    places_N2 = tensor_of(payload, "places", torch.int32, (number, 2)).long()
    steps_N3 = tensor_of(payload, "steps", torch.float32, (number, 3))
    if number and not 0 <= int(places_N2.min()) <= int(places_N2.max()) < len(states_M):
        raise DataError(f"`places` from {int(places_N2.min())} to {int(places_N2.max())} of {len(states_M)} states")
    if not bool((steps_N3[:, 2] > 0).all()):
        raise DataError("a transition without noise (a standard deviation of 0 in `steps`) is no decision")
    offsets_N = None
    if "offsets" in payload.arrays:
        offsets_N = tensor_of(payload, "offsets", torch.float32, (number, *shape))

    def at(part: slice) -> dict[str, torch.Tensor]:
        before_n, after_n = places_N2[part].unbind(1)
        return {
            "latents": states_M[before_n],
            "targets": states_M[after_n] if offsets_N is None else states_M[after_n] - offsets_N[part],
            "times": times_N[part],
            "steps": steps_N3[part],
            "is_regression": torch.zeros_like(before_n, dtype=torch.bool),
        }

    return at


def _regressions(
    payload: Payload, shape: tuple[int, int, int, int], times_N: torch.Tensor, is_given_T: torch.Tensor
) -> Callable[[slice], dict[str, torch.Tensor]]:
    sample = tensor_of(payload, "sample", torch.float32, shape)
    seed = int(tensor_of(payload, "noise_seed", torch.int64, ()))

    def at(part: slice) -> dict[str, torch.Tensor]:
        times_n = times_N[part]
        noise_n = sample.new_empty(len(times_n), *shape)
        for noise, index in zip(noise_n, range(len(times_N))[part], strict=True):
            noise.copy_(noise_of(seed, index, shape))
        each_n = times_n[:, None, None, None, None]
        return {
            "latents": torch.where(is_given_T[:, None, None], sample, (1 - each_n) * sample + each_n * noise_n),
            "targets": noise_n - sample,
            "times": times_n,
            "steps": torch.tensor([0.0, 1.0, 1.0]).expand(len(times_n), 3),
            "is_regression": torch.ones_like(times_n, dtype=torch.bool),
        }

    return at


def pack(
    payloads: Sequence[Payload],
    shape: tuple[int, int, int, int],
    conditioning: Callable[[Payload], Conditions],
    *,
    budget: int,
    neutral_guidance: float,
) -> list[MicroBatch]:
    """Decisions in the order of the payloads, at most `budget` to a micro-batch; sequences are split where one is full.

    A micro-batch is laid out when its inputs are asked for, and let go when those of another are: those of a whole step
    together would repeat conditions.

    `inputs` of a micro-batch, besides what conditions: `latents` and `targets` float32 [N, C, T, H, W], `times` float32
    [N], `steps` float32 [N, 3], `is_regression` bool [N], `guidance` float32 [N], `is_given` bool [N, T], `rows` int64
    [N] (the sequence of each).

    Args:
        payloads: What to pack.
        shape: (C, T, H, W) of their latents.
        conditioning: Tensors of a payload, of one shape for all; asked for once, and held once, also for payloads that
            share the arrays which condition them, as those of a group do.
        budget: Most decisions of a micro-batch.
        neutral_guidance: That of payloads without one: velocities are those of the prompt alone.

    Raises:
        DataError: A payload has no decisions that could be evaluated, or the budget is none.
    """
    if budget < 1:
        raise DataError(f"a micro-batch of {budget} decisions holds none; raise policy.micro_batch_units")
    trajectories = [trajectory_of(payload, shape, neutral_guidance) for payload in payloads]
    conditions = _conditions(payloads, conditioning)
    batches = list(_pieces([each.num_decisions for each in trajectories], budget))

    # Names of the one that was asked for last are asked for one by one.
    @functools.lru_cache(maxsize=1)
    def inputs_of(number: int) -> Mapping[str, torch.Tensor]:
        # Asked for first by who only looks, it is trained on next.
        with torch.inference_mode(mode=False), torch.no_grad():
            return _lay_out(batches[number], trajectories, conditions)

    return [
        MicroBatch(
            sequences=tuple(index for index, _, _ in pieces),
            num_decisions=tuple(taken for _, _, taken in pieces),
            num_units=sum(taken for _, _, taken in pieces),
            inputs=_Inputs(inputs_of, number),
            spans=tuple(Span(first=first, total=trajectories[index].num_decisions) for index, first, _ in pieces),
        )
        for number, pieces in enumerate(batches)
    ]


def _conditions(payloads: Sequence[Payload], conditioning: Callable[[Payload], Conditions]) -> list[Conditions]:
    found: dict[frozenset[tuple[str, int]], Conditions] = {}
    each = []
    for payload in payloads:
        key = frozenset((name, id(array)) for name, array in payload.arrays.items() if name not in _OF_DECISIONS)
        if key not in found:
            found[key] = conditioning(payload)
        each.append(found[key])
    return each


_Piece: TypeAlias = tuple[int, int, int]
"""Of a sequence: its index, its first decision, how many."""


def _pieces(totals: Sequence[int], budget: int) -> Iterator[list[_Piece]]:
    """Pieces of each micro-batch, from the decisions of each sequence; one without any has a piece of none."""
    held: list[_Piece] = []
    room = budget
    for index, total in enumerate(totals):
        first = 0
        while True:
            taken = min(room, total - first)
            held.append((index, first, taken))
            first, room = first + taken, room - taken
            if not room:
                yield held
                held, room = [], budget
            if first == total:
                break
    if held:
        yield held


def _lay_out(
    pieces: Sequence[_Piece], trajectories: Sequence[Trajectory], conditions: Sequence[Conditions]
) -> Mapping[str, torch.Tensor]:
    own = [trajectories[index] for index, _, _ in pieces]
    parts = [each.at(slice(first, first + taken)) for each, (_, first, taken) in zip(own, pieces, strict=True)]
    inputs = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    rows_N = torch.repeat_interleave(torch.arange(len(pieces)), torch.tensor([taken for _, _, taken in pieces]))
    inputs["rows"] = rows_N
    inputs["guidance"] = torch.tensor([each.guidance for each in own])[rows_N]
    inputs["is_given"] = torch.stack([each.is_given_T for each in own])[rows_N]
    joined = side_by_side([conditions[index] for index, _, _ in pieces])
    return inputs | {CONDITION + name: each for name, each in joined.items()}


class _Inputs(Mapping[str, torch.Tensor]):
    """Inputs of a micro-batch, laid out when they are asked for."""

    def __init__(self, inputs_of: Callable[[int], Mapping[str, torch.Tensor]], number: int) -> None:
        self._inputs_of = inputs_of
        self._number = number

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._inputs_of(self._number)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._inputs_of(self._number))

    def __len__(self) -> int:
        return len(self._inputs_of(self._number))


LEAST: Final = 1e-4
"""Times are kept this far from 0 and 1, where nothing is noisy or nothing is left."""


def draw_times(options: DiffusionOptions, number: int, generator: torch.Generator) -> torch.Tensor:
    """So many times, float32 [N], in (0, 1), by the law, mean, standard deviation and shift of the options."""
    if options.times == "uniform":
        times_N = torch.rand(number, generator=generator)
    else:
        # Both are the logistic function: of the drawn number, or of the logarithm of σ.
        times_N = torch.sigmoid(options.times_mean + options.times_std * torch.randn(number, generator=generator))
    times_N = options.times_shift * times_N / (1 + (options.times_shift - 1) * times_N)
    return times_N.clamp(LEAST, 1 - LEAST)


def noise_of(seed: int, decision: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The noise of one regression, float32 on the CPU: drawn from the two numbers alone."""
    return torch.randn(shape, generator=generator_of(seed, decision))


def generator_of(seed: int, number: int) -> torch.Generator:
    """A generator that two numbers seed; neighbouring numbers give streams that have nothing in common."""
    digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


VELOCITY: Final = "velocity"
_HALF_LOG_TAU: Final = 0.5 * math.log(2 * math.pi)
_REGRESSION_STD: Final = math.sqrt(0.5)


class Decisions:
    """Decisions before their velocity is computed, of the inputs of a micro-batch (see `packing.pack`)."""

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        self.latents_N: Final = inputs["latents"]
        self.targets_N: Final = inputs["targets"]
        self.times_N: Final = inputs["times"]
        self.steps_N: Final = inputs["steps"]
        self.is_regression_N: Final = inputs["is_regression"]
        self.is_given_NT: Final = inputs["is_given"]

    def mean(self, values_N: torch.Tensor) -> torch.Tensor:
        """The mean [N] over decided dims of [N, C, T, H, W]."""
        per_frame_NT = values_N.mean((1, 3, 4))
        decided_NT = (~self.is_given_NT).to(per_frame_NT.dtype)
        return (per_frame_NT * decided_NT).sum(1) / decided_NT.sum(1)

    def decide(
        self,
        velocity_N: torch.Tensor,
        *,
        with_entropy: bool = False,
        prediction_for: Comparison | None = None,
        kl_target: KLTarget | None = None,
    ) -> Decided:
        """Score decisions by their velocities, float32 [N, C, T, H, W].

        With `prediction_for` the velocities are given, too: on the CPU, as those of a whole step are kept, of which
        each is as large as a video's latents.
        """
        std_N = torch.where(self.is_regression_N, torch.full_like(self.times_N, _REGRESSION_STD), self.steps_N[:, 2])
        divergence_N, blended = None, None
        if kl_target is not None:
            theirs_N = kl_target.prediction[VELOCITY].to(velocity_N.device)
            if isinstance(kl_target.comparison, Divergence):
                # Of two normals of the same variance, the same either way.
                divergence_N = 0.5 * (self.steps_N[:, 1] / std_N) ** 2 * self.mean((velocity_N - theirs_N) ** 2)
            else:
                blended = self.blended(kl_target.comparison, velocity_N, theirs_N)
        return Decided(
            logprobs_N=self.logprobs(velocity_N),
            # Of the normal distributions, for one dim.
            entropy_N=(std_N.log() + _HALF_LOG_TAU + 0.5).detach() if with_entropy else None,
            prediction=None if prediction_for is None else {VELOCITY: velocity_N.detach().cpu()},
            divergence_N=divergence_N,
            blended=blended,
        )

    def logprobs(self, velocity_N: torch.Tensor) -> torch.Tensor:
        """float32 [N]: of transitions the log-density, of regressions the negative squared error."""
        a_N, b_N, std_N = self.steps_N.unbind(1)
        errors_N = self.mean((self.targets_N - (_each(a_N) * self.latents_N + _each(b_N) * velocity_N)) ** 2)
        density_N = -errors_N / (2 * std_N**2) - std_N.log() - _HALF_LOG_TAU
        return torch.where(self.is_regression_N, -errors_N, density_N)

    def blended(self, blend: Blend, velocity_N: torch.Tensor, other_N: torch.Tensor) -> Blended:
        """Distances of the samples that blends stand for from the true ones.

        Raises:
            TrainingError: A decision is no regression, so there is no true one.
        """
        if not bool(self.is_regression_N.all()):
            raise TrainingError("blends are of regressions, and a micro-batch has transitions; train on samples alone")
        squared, absolute = [], []
        for share in blend.shares:
            # x_t - t v - x_0, since x_t - t (e - x_0) is x_0.
            error_N = _each(self.times_N) * (self.targets_N - (share * velocity_N + (1 - share) * other_N))
            squared.append(self.mean(error_N**2))
            absolute.append(self.mean(error_N.detach().abs()))
        return Blended(squared_NK=torch.stack(squared, 1), absolute_NK=torch.stack(absolute, 1))


def _each(values_N: torch.Tensor) -> torch.Tensor:
    return values_N[:, None, None, None, None]
