"""The diffusion engine: samples of world models, denoised step by step (`protocols.RolloutEngine`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from cosmos_core.errors import DataError, EngineError
from cosmos_core.protocols import CachePolicy, Denoising, EngineContext, Request, TensorSlice
from cosmos_core.rollout.diffusion.concluding import conclude, priced, rendered
from cosmos_core.rollout.diffusion.denoising import denoise
from cosmos_core.rollout.diffusion.foresight import problems
from cosmos_core.rollout.diffusion.itinerary import itinerary
from cosmos_core.rollout.diffusion.options import DiffusionOptions
from cosmos_core.rollout.diffusion.queue import DenoisingQueue
from cosmos_core.rollout.diffusion.requests import check_request
from cosmos_core.rollout.diffusion.trajectory import DenoisingFlight, Prefix, Trajectory
from cosmos_core.rollout.serving.engine import ServedEngine
from cosmos_core.rollout.serving.flight import ServedHandle
from cosmos_core.rollout.serving.updates import Update, whole_layout
from cosmos_core.types import Payload
from cosmos_core.weights.digest import digest_of
from cosmos_core.weights.shards import canonical_tensors


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
    def _model(self) -> Denoising:
        model = self._context.model
        assert isinstance(model, Denoising)
        return model

    # -- steps --------------------------------------------------------------------------------------------------------

    def _admit(self, request: Request) -> DenoisingFlight:
        canvas = check_request(request, self._options, self._model)
        asked = self._options.guidance
        return DenoisingFlight(
            request,
            ServedHandle(request),
            0,
            canvas,
            itinerary(self._options, request.sampling, request.seed),
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
        ended = [sample for sample in samples if sample.at == sample.flight.itinerary.num_steps]
        for sample in ended:
            self._conclude(sample)
        if ended:
            self._finish(ended)

    def _part(self, sample: Trajectory) -> None:
        """Let the others of a group go on from where its first sample is, if they part there."""
        flight = sample.flight
        if flight.prefix is None and 0 < flight.itinerary.branch == sample.at:
            assert sample.state is not None
            flight.prefix = Prefix(sample.state.clone(), sample.remembered)
            self._denoisers.part(flight)

    def _conclude(self, sample: Trajectory) -> None:
        options, version = self._options, self._denoisers.version
        conclude(self._context.model, self._module, sample, version=version, regressions=options.regressions)
        if options.regressions and sample.flight.request.sampling.temperature:
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
                return priced(self._context.model, self._module, payloads, budget=self._context.max_in_flight)
            except DataError as error:
                raise EngineError(f"a payload to score: {error}") from error

        return self._commands.call(score)
