"""The diffusion engine: samples of world models, denoised step by step (`protocols.RolloutEngine`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import torch

from cosmos_core.errors import CosmosError, DataError, EngineError
from cosmos_core.protocols import CachePolicy, EngineContext, Model, Request, TensorSlice
from cosmos_core.protocols.world import LatentSpec, WorldModel
from cosmos_core.rollout.serving.engine import ServedEngine
from cosmos_core.rollout.serving.requests import ServedHandle
from cosmos_core.rollout.serving.updates import Update, whole_layout
from cosmos_core.types import Array, Payload
from cosmos_core.weights.digest import digest_of
from cosmos_core.weights.shards import canonical_tensors
from cosmos_engine_diffusion.denoising import denoise
from cosmos_engine_diffusion.options import DiffusionOptions
from cosmos_engine_diffusion.preflight import noiseless, problems, sampling_problems
from cosmos_engine_diffusion.schedule import make_schedule, sample_seed
from cosmos_engine_diffusion.trajectory import DenoisingQueue, DenoisingRequestState, Prefix, Trajectory, array


class DiffusionEngine(ServedEngine[Trajectory]):
    """Denoises samples of several requests together; each step of each is by the weights that are loaded then."""

    def __init__(self, options: DiffusionOptions, context: EngineContext) -> None:
        super().__init__(context)
        self._options: Final = options
        self._denoisers: Final = DenoisingQueue(num_slots=context.max_in_flight)

    # -- life ---------------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        context = self._context
        for problem in problems(self._options, context.model):
            raise EngineError(problem)
        self._module = context.model.build(seed=context.seed, dtype=context.dtype, device=context.device)
        self._module.eval().requires_grad_(requires_grad=False)
        self._tensors = canonical_tensors(self._module)

    def _unbuild(self) -> None:
        """Nothing is held that ends with the engine."""

    @property
    def _queue(self) -> DenoisingQueue:
        return self._denoisers

    @property
    def _model(self) -> WorldModel:
        model = self._context.model
        assert isinstance(model, WorldModel)
        return model

    # -- steps --------------------------------------------------------------------------------------------------------

    def _admit(self, request: Request) -> DenoisingRequestState:
        latent_spec = check_request(request, self._options, self._model)
        asked = self._options.guidance
        return DenoisingRequestState(
            request,
            ServedHandle(request),
            0,
            latent_spec,
            make_schedule(self._options, request.sampling, request.seed),
            self._model.neutral_guidance if asked is None else asked,
        )

    def _advance(self) -> None:
        samples = self._denoisers.admit()
        for sample in samples:
            sample.start(self._context.device)
        made = denoise(self._model, self._module, samples, self._denoisers.version)
        self._generated += made
        self._prompted += len(samples) - made
        for sample in samples:
            self._part(sample)
        ended = [sample for sample in samples if sample.at == sample.parent.schedule.num_steps]
        for sample in ended:
            self._end(sample)
        if ended:
            self._finish(ended)

    def _part(self, sample: Trajectory) -> None:
        """Let the others of a group go on from where its first sample is, if they part there."""
        parent = sample.parent
        if parent.prefix is None and 0 < parent.schedule.branch == sample.at:
            assert sample.state is not None
            parent.prefix = Prefix(sample.state.clone(), sample.history)
            self._denoisers.part(parent)

    def _end(self, sample: Trajectory) -> None:
        options, version = self._options, self._denoisers.version
        finish_payload(self._context.model, self._module, sample, version=version, regressions=options.regressions)
        if options.regressions and sample.parent.request.sampling.temperature:
            self._generated += options.regressions
        sample.end(rendered(self._model, sample, size=options.render_size))

    # -- weights ------------------------------------------------------------------------------------------------------

    def layout(self) -> Mapping[int, Sequence[tuple[TensorSlice, str]]]:
        """Rank 0 holds every canonical tensor whole."""
        return {0: whole_layout(self._tensors)}

    def _tensors_to_write(self) -> Mapping[str, torch.Tensor]:
        return self._tensors

    def _apply(self, update: Update, cache: CachePolicy) -> str:  # noqa: ARG002 - a step leaves nothing to recompute
        update.apply()
        self._denoisers.version = update.version
        # Hashed here, before the next step: nothing is generated with weights that were not attested.
        return digest_of(self._tensors)

    # -- scoring ------------------------------------------------------------------------------------------------------

    def score(self, payloads: Sequence[Payload], *, temperature: float) -> list[torch.Tensor]:
        """float32 log-probs [N] of each payload's decisions under the loaded weights, on the CPU.

        Raises:
            EngineError: `temperature` is not 1, or a payload does not fit the model.
        """
        if temperature != 1.0:
            raise EngineError(f"cannot score at temperature {temperature}: a denoising step has none; give 1")

        def score() -> list[torch.Tensor]:
            try:
                return logprobs_of(self._context.model, self._module, payloads, budget=self._context.max_in_flight)
            except DataError as error:
                raise EngineError(f"a payload to score: {error}") from error

        return self._computed(score)


def check_request(request: Request, options: DiffusionOptions, model: WorldModel) -> LatentSpec:
    """The latents that a request asks for."""
    where, sampling = f"request {request.request_id!r}", request.sampling
    if request.prompt.kind != "latents":
        raise EngineError(f"{where}: its prompt is of kind {request.prompt.kind!r}; this engine takes 'latents'")
    if sampling.num_samples < 1 or (sampling.temperature == 0 and sampling.num_samples != 1):
        raise EngineError(f"{where}: {sampling.num_samples} samples at temperature {sampling.temperature}")
    for problem in sampling_problems(options, sampling):
        raise EngineError(f"{where}{problem}")
    for problem in noiseless(options) if sampling.temperature else ():
        raise EngineError(f"{where}: {problem}")
    try:
        latent_spec = model.latent_spec(request.prompt)
    except DataError as error:
        raise EngineError(f"{where}: {error}") from error
    if latent_spec.is_given_T is not None and bool(latent_spec.is_given_T.all()):
        raise EngineError(
            f"{where}: all of its {latent_spec.shape[1]} latent frames are given, none is left to denoise"
        )
    return latent_spec


def finish_payload(
    model: Model, module: torch.nn.Module, sample: Trajectory, *, version: int, regressions: int
) -> None:
    """Give a trajectory that is at t = 0 its payload; it is learned at so many points, or for 0 by its transitions."""
    assert sample.state is not None
    made = {**sample.arrays(), "sample": array(sample.state)}
    payload = attrs.evolve(sample.parent.request.prompt, arrays=made)
    if regressions and sample.parent.request.sampling.temperature:
        assert isinstance(model, WorldModel)
        of_transitions = ("states", "places", "steps", "logprobs", "versions", "times")
        plain = attrs.evolve(payload, arrays={name: made[name] for name in made if name not in of_transitions})
        seed = sample_seed(sample.parent.request.seed, sample.index)
        try:
            learned = model.noised(plain, seed, num_decisions=regressions)
            (logprobs_N,) = logprobs_of(model, module, [learned], budget=regressions)
        except CosmosError as error:
            raise EngineError(f"the model does not learn what it made: {error}") from error
        if not bool(logprobs_N.isfinite().all()):
            raise EngineError(f"the model gives errors that are not finite at weight version {version}")
        versions = array(torch.full((regressions,), version, dtype=torch.int32))
        told = {"logprobs": array(logprobs_N), "versions": versions}
        payload = attrs.evolve(learned, arrays={**learned.arrays, **told})
    sample.finished = payload


def logprobs_of(
    model: Model, module: torch.nn.Module, payloads: Sequence[Payload], *, budget: int
) -> list[torch.Tensor]:
    """float32 log-probs [N] of the decisions of each payload, on the CPU, in forwards of at most `budget` decisions."""
    found: list[list[torch.Tensor]] = [[] for _ in payloads]
    for batch in model.pack(payloads, budget=budget):
        logprobs_N = model.decide(module, batch, temperature=1.0).logprobs_N.float().cpu()
        for index, part in zip(batch.sequences, torch.split(logprobs_N, list(batch.num_decisions)), strict=True):
            found[index].append(part)
    return [torch.cat(parts) if parts else torch.zeros(0) for parts in found]


def rendered(model: WorldModel, sample: Trajectory, *, size: int) -> Payload:
    """Render a trajectory that is at t = 0; its longer side has at most `size` pixels, or for 0 all of them."""
    assert sample.state is not None
    media = model.render(sample.state, sample.parent.request.prompt)
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
    pixels = torch.frombuffer(bytearray(frames.data), dtype=torch.uint8).view(frames.shape).permute(0, 3, 1, 2)
    height, width = (max(1, round(each * scale)) for each in frames.shape[1:3])
    smaller = torch.nn.functional.interpolate(pixels.float(), size=(height, width), mode="area")
    return array(smaller.round().to(torch.uint8).permute(0, 2, 3, 1))
