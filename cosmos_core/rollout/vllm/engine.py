"""The vLLM engine: vLLM's steps, between which weights are written into its live parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from transformers import PreTrainedModel

from cosmos_core.errors import EngineError
from cosmos_core.protocols import CachePolicy, Conditioning, EngineContext, Request, TensorSlice
from cosmos_core.rollout.serving.engine import ServedEngine
from cosmos_core.rollout.serving.given import to_score
from cosmos_core.rollout.serving.sequence import Sequence as Sample
from cosmos_core.rollout.serving.updates import Update, whole_layout
from cosmos_core.rollout.vllm.admission import Admission
from cosmos_core.rollout.vllm.backend import Backend, Drawn, check_sampling
from cosmos_core.rollout.vllm.options import VllmOptions
from cosmos_core.rollout.vllm.regions import LoadedWeights
from cosmos_core.types import Array, Payload
from cosmos_core.weights import slices
from cosmos_core.weights.shards import canonical_tensors

_PROBE_UNITS: Final = 12
_LIMITS: Final = {torch.float32: 1e-3}
_LOW_PRECISION_LIMIT: Final = 0.1
"""Mean difference of log-probs: rounding gives at most 0.02 in bfloat16."""


class VllmEngine(ServedEngine):
    """Generates with vLLM in this process, for prompts of text."""

    def __init__(self, options: VllmOptions, context: EngineContext) -> None:
        super().__init__(context, name="vllm")
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
        self._backend = backend = Backend(module, self._options, context)
        tensors = canonical_tensors(module)
        self._loaded = LoadedWeights(backend.model, tensors)
        self._loaded.copy((slices.whole(name, tuple(tensor.shape)), tensor) for name, tensor in tensors.items())
        backend.settle()
        self._admission = Admission(backend, num_slots=context.max_in_flight)
        self._num_tokens = int(module.get_input_embeddings().num_embeddings)
        self._probe(module, backend)

    def _unbuild(self) -> None:
        if self._backend is not None:
            self._backend.close()
            self._backend = None

    @torch.no_grad()
    def _probe(self, module: PreTrainedModel, backend: Backend) -> None:
        """Let vLLM evaluate one sequence, and compare it with the model's own evaluation."""
        size = min(_PROBE_UNITS, self._context.context_length)
        ids = np.linspace(0, self._num_tokens - 1, size, dtype=np.int32)
        found_N = torch.tensor(backend.probe(ids.tolist()))
        if not self._options.verify:
            return
        payload = Payload(kind="tokens", arrays={"prompt": _ids(ids[:1]), "completion": _ids(ids[1:])})
        (batch,) = self._context.model.pack([payload], budget=size)
        expected_N = self._context.model.decide(module, batch, temperature=1.0).logprobs_N
        difference = (found_N - expected_N).abs().mean().item()
        limit = _LIMITS.get(self._context.dtype, _LOW_PRECISION_LIMIT)
        if not difference <= limit:
            raise EngineError(
                f"vLLM's {type(backend.model).__name__} gives other log-probs than {type(module).__name__} with the "
                f"same weights (mean difference {difference:.2g}, allowed {limit:g}): it computes otherwise, or holds "
                "weights in a form of its own; use the engine 'embedded'"
            )

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
        if super()._check(request) is not None:
            raise EngineError(f"{where}: the vllm engine takes prompts of text only; use the engine 'embedded'")
        check_sampling(request.sampling, where)
        return None

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
            self._prompted += sample.flight.num_prompt - drawn.num_cached
        sample.tokens.extend(drawn.tokens)
        sample.logprobs.extend(drawn.logprobs)
        self._generated += len(drawn.tokens)
        sample.reason = drawn.reason
        return None if drawn.reason is None else sample

    # -- weights ------------------------------------------------------------------------------------------------------

    def layout(self) -> Mapping[int, Sequence[tuple[TensorSlice, str]]]:
        """Rank 0 holds every canonical tensor whole, in parts of vLLM's own parameters."""
        return {0: whole_layout(self._loaded.facts)}

    def _tensors_to_write(self) -> Mapping[str, torch.Tensor]:
        return self._loaded.facts

    def _apply(self, update: Update, cache: CachePolicy) -> str:
        self._loaded.copy(update.pieces())
        self._vllm.settle()
        self._admission.mark(update.version)
        if cache == "recompute":
            self._vllm.forget_caches()
        # Read back here, before the next step: nothing is generated with weights that were not attested.
        return self._loaded.digest()

    # -- scoring ------------------------------------------------------------------------------------------------------

    def score(self, payloads: Sequence[Payload], *, temperature: float) -> list[torch.Tensor]:
        """float32 log-probs [N] of each payload's completion under the loaded weights, on the CPU.

        Raises:
            EngineError: `temperature` is not above 0, or a payload has no prompt, is too long, or shows what cannot be
                entered, or there is no room for it beside what is in flight.
        """
        if not temperature > 0:
            raise EngineError(f"cannot score at temperature {temperature}: it must be above 0")
        given = to_score(payloads, self._context.model, context_length=self._context.context_length)
        if any(each.conditioning is not None for each in given):
            raise EngineError("the vllm engine scores text only; use the engine 'embedded'")
        sequences = [each.tokens for each in given]
        rows = self._commands.call(lambda: self._vllm.score(sequences, temperature=temperature))
        return [
            torch.tensor([row[each.num_given - 1 + place] for place in each.decided_N], dtype=torch.float32)
            for row, each in zip(rows, given, strict=True)
        ]


def _ids(values: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> Array:
    return Array(dtype="int32", shape=values.shape, data=values.tobytes())
