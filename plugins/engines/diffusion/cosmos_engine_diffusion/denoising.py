"""Takes one denoising step of many samples at once, each at its own time and with its own coefficients.

Shape legend: B samples of one shape, C channels, T latent frames, H and W latent height and width.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final

import attrs
import torch

from cosmos_core.errors import EngineError
from cosmos_core.protocols.world import WorldModel
from cosmos_engine_diffusion.samplers import Row
from cosmos_engine_diffusion.trajectory import Decision, Trajectory

_HALF_LOG_TAU: Final = 0.5 * math.log(2.0 * math.pi)


@attrs.frozen(kw_only=True, eq=False)
class _Taken:
    """A step that was taken, of each sample of a batch; float32 [B, C, T, H, W] each.

    Attributes:
        before_B: x_t.
        drift_B: a x_t + b v.
        offset_B: What the samplers' history adds to that; None for nothing.
        after_B: x'.
    """

    before_B: torch.Tensor
    drift_B: torch.Tensor
    offset_B: torch.Tensor | None
    after_B: torch.Tensor


def denoise(model: WorldModel, module: torch.nn.Module, samples: Sequence[Trajectory], version: int) -> int:
    """Take the next step of each sample, begun and not ended; those of one shape and guidance share a forward.

    Gives how many of the steps were decisions.

    Raises:
        EngineError: A state or a log-probability is not finite.
    """
    made = 0
    for (_, guidance), alike in itertools.groupby(sorted(samples, key=_alike), key=_alike):
        batch = list(alike)
        before_B = torch.stack([_state(sample) for sample in batch])
        times_B = torch.tensor([sample.step.time for sample in batch], dtype=torch.float32, device=before_B.device)
        prompts = [sample.parent.request.prompt for sample in batch]
        velocity_B = model.velocity(module, before_B, times_B, prompts, guidance=guidance).float()
        taken = _taken(batch, before_B, velocity_B)
        if not bool(taken.after_B.isfinite().all()):
            raise EngineError(_overflow("states", version))
        made += _record(batch, taken, version)
        for index, sample in enumerate(batch):
            basis = [before_B[index], velocity_B[index], *sample.history]
            sample.history = [_combined(weights, basis) for weights in sample.step.kept]
            sample.state = taken.after_B[index]
            sample.versions.add(version)
            sample.at += 1
    return made


def _alike(sample: Trajectory) -> tuple[tuple[int, int, int, int], float]:
    return sample.parent.latent_spec.shape, sample.parent.guidance


def _state(sample: Trajectory) -> torch.Tensor:
    assert sample.state is not None
    return sample.state


def _taken(batch: Sequence[Trajectory], before_B: torch.Tensor, velocity_B: torch.Tensor) -> _Taken:
    rows = [(sample.step.of_state, sample.step.of_velocity, sample.step.std) for sample in batch]
    # In float32, as those who train on a step are told of it.
    a_B, b_B, std_B = torch.tensor(rows, dtype=torch.float32, device=before_B.device)[
        :, :, None, None, None, None
    ].unbind(1)
    drift_B = a_B * before_B + b_B * velocity_B
    offset_B = _offsets(batch, before_B)
    after_B = drift_B if offset_B is None else drift_B + offset_B
    if any(sample.step.std for sample in batch):
        noises = [sample.fresh() if sample.step.std else torch.zeros(before_B.shape[1:]) for sample in batch]
        after_B = after_B + std_B * torch.stack(noises).to(before_B.device)
    if any(sample.parent.latent_spec.given is not None for sample in batch):
        after_B = torch.stack(
            [sample.parent.latent_spec.with_given(after) for after, sample in zip(after_B, batch, strict=True)]
        )
    return _Taken(before_B=before_B, drift_B=drift_B, offset_B=offset_B, after_B=after_B)


def _offsets(batch: Sequence[Trajectory], like_B: torch.Tensor) -> torch.Tensor | None:
    """Terms that samplers' history adds to each mean; None where no sample has any."""
    if not any(sample.history for sample in batch):
        return None
    none = torch.zeros_like(like_B[0])
    return torch.stack(
        [_combined(sample.step.mean[2:], sample.history) if sample.history else none for sample in batch]
    )


def _record(batch: Sequence[Trajectory], taken: _Taken, version: int) -> int:
    """Keep the transitions that are decisions; how many they are."""
    decided = [index for index, sample in enumerate(batch) if sample.at in sample.parent.schedule.decided]
    if not decided:
        return 0
    logprobs = _logprobs(batch, taken)
    before_B, after_B = taken.before_B.cpu(), taken.after_B.cpu()
    offset_B = None if taken.offset_B is None else taken.offset_B.cpu()
    for index in decided:
        sample = batch[index]
        if not math.isfinite(logprobs[index]):
            raise EngineError(_overflow("log-probs", version))
        has_offset = offset_B is not None and bool(sample.history)
        sample.decisions.append(
            Decision(
                step=sample.step,
                # The last state of the step before, if that was a decision, too.
                before=sample.decisions[-1].after if sample.goes_on else before_B[index].clone(),
                after=after_B[index].clone(),
                offset=offset_B[index].clone() if offset_B is not None and has_offset else None,
                logprob=logprobs[index],
                version=version,
            )
        )
    return len(decided)


def _logprobs(batch: Sequence[Trajectory], taken: _Taken) -> list[float]:
    """The log-prob of each x', as the trainer computes it: a mean over frames not given; meaningless without noise."""
    target_B = taken.after_B if taken.offset_B is None else taken.after_B - taken.offset_B
    squares_BT = (target_B - taken.drift_B).square().mean((1, 3, 4)).cpu()
    decided_BT = torch.ones_like(squares_BT)
    for index, sample in enumerate(batch):
        if sample.parent.latent_spec.is_given_T is not None:
            decided_BT[index] = (~sample.parent.latent_spec.is_given_T).float()
    errors = ((squares_BT * decided_BT).sum(1) / decided_BT.sum(1)).tolist()
    return [
        -error / (2.0 * sample.step.std**2) - math.log(sample.step.std) - _HALF_LOG_TAU if sample.step.std else 0.0
        for sample, error in zip(batch, errors, strict=True)
    ]


def _combined(weights: Row, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The weighted sum of one tensor at least."""
    first, *others = zip(weights.tolist(), tensors, strict=True)
    total: torch.Tensor = first[0] * first[1]
    for weight, tensor in others:
        total = total + weight * tensor
    return total


def _overflow(what: str, version: int) -> str:
    return (
        f"the model gives {what} that are not finite at weight version {version}: its weights or activations overflow"
    )
