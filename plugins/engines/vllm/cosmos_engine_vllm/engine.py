"""The vLLM engine: vLLM's steps, between which weights are written into its live parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from transformers import PreTrainedModel

from cosmos_core.errors import EngineError
from cosmos_core.protocols import CachePolicy, EngineContext, Request, TensorSlice
from cosmos_core.protocols.quantization import FORMATS
from cosmos_core.protocols.vision import Conditioning
from cosmos_core.rollout.serving.scoring import scoring_inputs
from cosmos_core.rollout.serving.tokens import TokenEngine
from cosmos_core.rollout.serving.tokens import TokenSequence as Sample
from cosmos_core.rollout.serving.updates import LoadedWeights, Update
from cosmos_core.types import Payload
from cosmos_core.weights.shards import canonical_tensors
from cosmos_engine_vllm.admission import Admission
from cosmos_engine_vllm.backend import Backend, Drawn, check_sampling
from cosmos_engine_vllm.comparison import check
from cosmos_engine_vllm.options import VllmOptions
from cosmos_engine_vllm.shares import SharedUpdate
from cosmos_engine_vllm.weights import Weights


class VllmEngine(TokenEngine):
    """Generates with vLLM in this process."""

    def __init__(self, options: VllmOptions, context: EngineContext) -> None:
        super().__init__(context)
        self._options: Final = options
        self._backend: Backend | None = None

    # -- life ---------------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        context = self._context
        module = context.model.build(seed=context.seed, dtype=context.dtype, device=torch.device("cpu"))
        if not isinstance(module, PreTrainedModel):
            raise EngineError(
                f"{type(module).__name__} is no model of Hugging Face transformers, whose config vLLM needs; use "
                "the engine 'embedded'"
            )
        # Made of codes and scales, if matrices are quantised: it is what vLLM is compared with.
        tensors, form = canonical_tensors(module), FORMATS.get(context.quantization)
        with torch.no_grad():
            published = LoadedWeights(tensors, form, context.model.facts().matrices).tensors
        self._backend = backend = Backend(module, self._options, context, lost=self._lose)
        assert backend.workers is not None
        self._weights = Weights(backend.workers, backend.name, context, tensors=tensors, published=published)
        self._weights.load_first(published)
        self._media = backend.media()
        self._admission = Admission(backend, num_slots=context.max_in_flight)
        self._num_tokens = num_tokens = int(module.get_input_embeddings().num_embeddings)
        verify = self._options.verify
        check(module, context, backend, self._media, num_tokens=num_tokens, verify=verify)
        if context.sleeps and verify:
            # Digests are of parameters; vLLM's sleep also loses what it keeps elsewhere.
            backend.sleep()
            backend.wake()
            self._weights.load_first(published)
            check(module, context, backend, self._media, num_tokens=num_tokens, when="after it has slept, ")

    def _unbuild(self) -> None:
        if self._backend is not None:
            self._backend.close()
            self._backend = None

    @property
    def _queue(self) -> Admission:
        return self._admission

    @property
    def _vocabulary(self) -> int:
        return self._num_tokens

    @property
    def _vllm(self) -> Backend:
        assert self._backend is not None
        return self._backend

    # -- generation ---------------------------------------------------------------------------------------------------

    def _check(self, request: Request) -> Conditioning | None:
        where = f"request {request.request_id!r}"
        conditioning = super()._check(request)
        check_sampling(request.sampling, where)
        return None if conditioning is None else self._media.enter(request.prompt, conditioning, where)

    def _advance(self) -> None:
        self._admission.admit()
        ended = [sample for drawn in self._vllm.step() if (sample := self._take(drawn)) is not None]
        if ended:
            self._finish(ended)

    def _take(self, drawn: Drawn) -> Sample | None:
        """Add what was drawn to its sample; the sample, if it has ended."""
        sample = self._admission.of(drawn.name)
        if sample is None:
            return None
        if not math.isfinite(sum(drawn.logprobs)):
            raise EngineError(
                f"the model gives log-probs that are not finite at weight version {self._admission.version}: "
                "its weights or activations overflow"
            )
        if not sample.num_generated:
            self._prompted += sample.parent.num_prompt - drawn.num_cached
            self._reused += drawn.num_cached
        sample.tokens.extend(drawn.tokens)
        sample.logprobs.extend(drawn.logprobs)
        self._generated += len(drawn.tokens)
        sample.reason = drawn.reason
        return None if drawn.reason is None else sample

    # -- weights ------------------------------------------------------------------------------------------------------

    def layout(self) -> Mapping[int, Sequence[tuple[TensorSlice, str]]]:
        """For each rank of vLLM, what it holds of the canonical tensors, matrices as codes and scales if quantised."""
        return self._weights.layout()

    def _tensors_to_write(self) -> Mapping[str, torch.Tensor]:
        return self._weights.tensors

    def _new_update(self, version: int) -> SharedUpdate:
        return self._weights.update(version)

    def _apply(self, update: Update, cache: CachePolicy) -> str:
        assert isinstance(update, SharedUpdate)
        self._weights.load(update)
        self._vllm.settle()
        self._admission.mark(update.version)
        if cache == "recompute":
            self._vllm.forget_caches()
        # Read back here, before the next step: nothing is generated with weights that were not attested.
        return self._weights.digest()

    def _free(self) -> None:
        self._vllm.sleep()

    def _allocate(self) -> None:
        self._vllm.wake()

    # -- scoring ------------------------------------------------------------------------------------------------------

    def score(self, payloads: Sequence[Payload], *, temperature: float) -> list[torch.Tensor]:
        """float32 log-probs [N] of each payload's completion under the loaded weights, on the CPU.

        Raises:
            EngineError: `temperature` is not above 0, or a payload has no prompt, is too long, has ids outside the
                vocabulary, or shows what cannot be entered, or there is no room for it beside what is in flight.
        """
        if not temperature > 0:
            raise EngineError(f"cannot score at temperature {temperature}: it must be above 0")
        given = scoring_inputs(
            payloads,
            self._context.model,
            context_length=self._context.context_length,
            vocabulary=self._vocabulary,
        )
        shows = [
            None if each.conditioning is None else self._media.enter(each.prompt, each.conditioning, f"payload {index}")
            for index, each in enumerate(given)
        ]
        sequences = [each.tokens for each in given]
        rows = self._computed(lambda: self._vllm.score(sequences, temperature=temperature, shows=shows))
        return [
            torch.tensor([row[each.num_given - 1 + place] for place in each.decided_N], dtype=torch.float32)
            for row, each in zip(rows, given, strict=True)
        ]
