"""What a finished trajectory comes to: its sample, how it looks, and what is learned of it."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from cosmos_core.errors import CosmosError, EngineError
from cosmos_core.protocols import Denoising, Model, Noising
from cosmos_core.rollout.diffusion.noise import sample_seed
from cosmos_core.rollout.diffusion.trajectory import Trajectory, array
from cosmos_core.types import Array, Payload


def conclude(model: Model, module: torch.nn.Module, sample: Trajectory, *, version: int, regressions: int) -> None:
    """Give a trajectory that is at t = 0 its payload.

    Args:
        model: The model.
        module: Its weights.
        sample: At its end.
        version: Of the weights.
        regressions: At how many points it is to be learned; 0 to learn its transitions.

    Raises:
        EngineError: The model refuses what it made itself.
    """
    assert sample.state is not None
    made = {**sample.arrays(), "sample": array(sample.state)}
    payload = attrs.evolve(sample.flight.request.prompt, arrays=made)
    if regressions and sample.flight.request.sampling.temperature:
        assert isinstance(model, Noising)
        of_transitions = ("states", "places", "steps", "logprobs", "versions", "times")
        plain = attrs.evolve(payload, arrays={name: made[name] for name in made if name not in of_transitions})
        seed = sample_seed(sample.flight.request.seed, sample.index)
        try:
            learned = model.noised(plain, seed, num_decisions=regressions)
            (logprobs_N,) = priced(model, module, [learned], budget=regressions)
        except CosmosError as error:
            raise EngineError(f"the model does not learn what it made: {error}") from error
        if not bool(logprobs_N.isfinite().all()):
            raise EngineError(f"the model gives errors that are not finite at weight version {version}")
        versions = array(torch.full((regressions,), version, dtype=torch.int32))
        told = {"logprobs": array(logprobs_N), "versions": versions}
        payload = attrs.evolve(learned, arrays={**learned.arrays, **told})
    sample.finished = payload


def priced(model: Model, module: torch.nn.Module, payloads: Sequence[Payload], *, budget: int) -> list[torch.Tensor]:
    """float32 log-probs [N] of the decisions of each payload, on the CPU.

    Args:
        model: The model.
        module: Its weights.
        payloads: With decisions of any kind.
        budget: Most decisions of one forward.

    Raises:
        DataError: A payload does not fit the model.
    """
    found: list[list[torch.Tensor]] = [[] for _ in payloads]
    for batch in model.pack(payloads, budget=budget):
        logprobs_N = model.decide(module, batch, temperature=1.0).logprobs_N.float().cpu()
        for index, part in zip(batch.sequences, torch.split(logprobs_N, list(batch.num_decisions)), strict=True):
            found[index].append(part)
    return [torch.cat(parts) if parts else torch.zeros(0) for parts in found]


def rendered(model: Denoising, sample: Trajectory, *, size: int) -> Payload:
    """How a trajectory that is at t = 0 looks.

    Args:
        model: The model.
        sample: At its end.
        size: Most pixels of the longer side; 0 for as many as there are.

    Raises:
        EngineError: The model gives no frames.
    """
    assert sample.state is not None
    media = model.render(sample.state, sample.flight.request.prompt)
    frames = media.arrays.get("frames")
    if media.kind != "media" or frames is None or frames.dtype != "uint8" or len(frames.shape) != 4:
        found = "none" if frames is None else f"{frames.dtype} {list(frames.shape)}"
        raise EngineError(
            f"the model renders a payload of kind {media.kind!r} with the frames {found}; give kind 'media', "
            "uint8 [F, height, width, 3]"
        )
    longest = max(frames.shape[1:3])
    if not size or longest <= size:
        return media
    return attrs.evolve(media, arrays={**media.arrays, "frames": _scaled(frames, size / longest)})


def _scaled(frames: Array, scale: float) -> Array:
    """Frames made smaller."""
    pixels = torch.frombuffer(bytearray(frames.data), dtype=torch.uint8).view(frames.shape).permute(0, 3, 1, 2)
    height, width = (max(1, round(each * scale)) for each in frames.shape[1:3])
    smaller = torch.nn.functional.interpolate(pixels.float(), size=(height, width), mode="area")
    return array(smaller.round().to(torch.uint8).permute(0, 2, 3, 1))
