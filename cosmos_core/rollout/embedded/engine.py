"""The embedded engine: Hugging Face modules, stepped with a cache of slots (`protocols.RolloutEngine`)."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import torch

from cosmos_core.errors import EngineError
from cosmos_core.protocols import CachePolicy, EngineContext, EngineStats, FinishReason, Model, Request, TensorSlice
from cosmos_core.protocols.model import MoEModel, Record
from cosmos_core.protocols.quantization import FORMATS
from cosmos_core.protocols.vision import VisionModel
from cosmos_core.rollout.embedded.cache import SlotCache
from cosmos_core.rollout.embedded.graphs import DecodeGraphs
from cosmos_core.rollout.embedded.options import EmbeddedOptions, problems
from cosmos_core.rollout.embedded.packed import PackedMatrices
from cosmos_core.rollout.embedded.paged import PagedCache, cache_for, dense_because
from cosmos_core.rollout.embedded.plan import Plan
from cosmos_core.rollout.embedded.prefix_cache import PrefixCache
from cosmos_core.rollout.embedded.runner import EncoderCache, Runner
from cosmos_core.rollout.embedded.sampler import SlotNumbers, draw_next
from cosmos_core.rollout.embedded.scheduler import Scheduler
from cosmos_core.rollout.embedded.verification import install_attention
from cosmos_core.rollout.serving.scoring import scoring_inputs
from cosmos_core.rollout.serving.tokens import TokenEngine, TokenRequestState, TokenSequence
from cosmos_core.rollout.serving.updates import LoadedWeights, Update, whole_layout
from cosmos_core.types import Payload
from cosmos_core.weights.shards import canonical_tensors, dtype_name
from cosmos_core.weights.storages import Storages

_LOG: Final = logging.getLogger(__name__)


class EmbeddedEngine(TokenEngine):
    """Generates with continuous batching, in this process."""

    def __init__(self, options: EmbeddedOptions, context: EngineContext) -> None:
        super().__init__(context)
        self._options = options
        self._stop_ids = context.model.facts().stop_ids
        self._prompts: EncoderCache | None = None
        self._recorder: Recorder | None = None
        self._packed: PackedMatrices | None = None
        self._graphs: DecodeGraphs | None = None

    # -- life ---------------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        context, options = self._context, self._options
        for problem in problems(options, context.model):
            raise EngineError(problem)
        module = context.model.build(seed=context.seed, dtype=context.dtype, device=context.device)
        module.eval().requires_grad_(False)
        self._prompts = EncoderCache(context.model, module) if isinstance(context.model, VisionModel) else None
        form = FORMATS.get(context.quantization)
        with torch.no_grad():
            self._loaded = LoadedWeights(canonical_tensors(module), form, context.model.facts().matrices)
        self._runner = Runner(module, context.device, self._prompts)
        self._packed = PackedMatrices.of(module) if options.pack_matrices else None
        with torch.inference_mode():
            calls = install_attention(
                module,
                self._runner,
                context_length=context.context_length,
                verify=options.verify,
                compiles=options.compile,
            )
        self._num_tokens = int(module.get_input_embeddings().num_embeddings)  # type: ignore[operator]
        sizes = {"step": options.cache_step, "longest": context.context_length}
        most = None if options.cache_gib is None else int(options.cache_gib * 2**30)
        self._cache = cache_for(
            calls, context.dtype, context.device, num_slots=context.max_in_flight, most_bytes=most, **sizes
        )
        self._numbers = SlotNumbers(context.max_in_flight, self._vocabulary, context.device)
        self._prefixes = PrefixCache(self._cache, num_slots=context.max_in_flight, share=self._kept_share())
        self._scheduler = Scheduler(
            self._cache,
            self._numbers,
            self._prefixes,
            num_slots=context.max_in_flight,
            prefill_units=options.prefill_units,
            shares_beginnings=context.dialogues,
        )
        self._recorder = Recorder.of(context.model, module)
        self._graphs = self._captured(dense_because(calls.values(), context.dtype, context.device))

    def _kept_share(self) -> float:
        """Share of the cache in which turns of dialogues that ended are kept."""
        if not self._context.dialogues:
            return 0.0
        if isinstance(self._cache, SlotCache) and self._context.device.type != "cpu":
            _LOG.info("each turn of a dialogue processes all before it: on GPUs, only a cache in pages keeps them")
            return 0.0
        return self._options.prefix_cache

    def _captured(self, dense: str) -> DecodeGraphs | None:
        """Graphs of steps that only decode, where there can be any; `dense` is why the cache is, if it is."""
        cache, graphs, lies, lacks = self._cache, None, f"dense, since {dense}", "the cache is dense"
        if isinstance(cache, PagedCache):
            most = "" if cache.bound is None else f", {max(0, cache.bound - 1)} of them at most"
            lies, lacks = f"in pages of {cache.page} units{most}", ""
            if not self._options.cuda_graphs:
                lacks = "rollout.engine.options.cuda_graphs is false"
            elif self._recorder is not None:
                lacks = "the model records its forwards"
            else:
                graphs = DecodeGraphs(self._runner, cache, self._numbers, self._context.max_in_flight)
        elif self._options.cache_gib is not None and self._context.device.type != "cpu":
            raise EngineError(
                f"rollout.engine.options.cache_gib: {self._options.cache_gib:g} bounds a cache in pages, and that of "
                f"this model is dense, since {dense}; leave it out, and lower rollout.max_in_flight"
            )
        decoded = f"launched kernel by kernel, since {lacks}" if lacks else "replayed as CUDA graphs"
        _LOG.info("the KV cache is %s; steps that only decode are %s", lies, decoded)
        return graphs

    def _unbuild(self) -> None:
        """Nothing is held that ends with the engine."""

    @property
    def _queue(self) -> Scheduler:
        return self._scheduler

    @property
    def _vocabulary(self) -> int:
        return self._num_tokens

    def stats(self) -> EngineStats:
        """Counters and gauges."""
        return attrs.evolve(
            super().stats(), evicted_units=self._prefixes.evicted_units, preempted=self._scheduler.num_preempted
        )

    def _admit(self, request: Request) -> TokenRequestState:
        parent, cache = super()._admit(request), self._cache
        if isinstance(cache, PagedCache) and cache.bound is not None:
            needed, most = cache.size_of(parent.longest) // cache.page, max(0, cache.bound - 1)
            if needed > most:
                raise EngineError(
                    f"request {request.request_id!r}: a prompt of {parent.num_prompt} and a completion of up to "
                    f"{request.sampling.max_units} units need {needed} pages of {cache.page} units, and "
                    f"rollout.engine.options.cache_gib = {self._options.cache_gib:g} holds {most}; raise it"
                )
        return parent

    # -- steps --------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        plan = self._scheduler.plan()
        self._cache.prepare(plan)
        drawn_2R = self._drawn(plan)
        if self._recorder is not None:
            self._recorder.keep(plan)
        if self._prompts is not None:
            self._prompts.retain(plan)
        self._prompted += len(plan.chunk_tokens)
        self._reused += plan.num_reused
        if drawn_2R is not None:
            # The only wait for the device in a step that feeds no prompt.
            tokens, logprobs = (row[: len(plan.drawn)] for row in drawn_2R.tolist())
            self._take(plan, list(map(int, tokens)), logprobs)

    def _drawn(self, plan: Plan) -> torch.Tensor | None:
        """Tokens that the step's sequences draw, and log-probs, float64 [2, R or more]; None if none draws."""
        graphs, features = self._graphs, self._scheduler.features
        if graphs is not None and not graphs.refusal and self._runner.only_decodes(plan):
            return graphs.step(plan.num_decoding, features)
        logits_RV = self._runner.step(plan, self._cache, self._numbers)
        return draw_next(logits_RV, self._numbers, features) if plan.drawn else None

    def _take(self, plan: Plan, tokens: list[int], logprobs: list[float]) -> None:
        if not math.isfinite(sum(logprobs)):
            raise EngineError(
                f"the model gives log-probs that are not finite at weight version {self._scheduler.version}: "
                "its weights or activations overflow"
            )
        ended = []
        for sample, token, logprob in zip(plan.drawn, tokens, logprobs, strict=True):
            sample.tokens.append(token)
            sample.logprobs.append(logprob)
            if token in self._stop_ids:
                sample.reason = FinishReason.STOP
            elif len(sample.logprobs) >= sample.parent.request.sampling.max_units:
                sample.reason = FinishReason.LENGTH
            else:
                continue
            ended.append(sample)
        self._generated += len(tokens)
        if ended:
            self._finish(ended)

    # -- weights ------------------------------------------------------------------------------------------------------

    def layout(self) -> Mapping[int, Sequence[tuple[TensorSlice, str]]]:
        """Rank 0 holds every canonical tensor whole, matrices as codes and scales if they are quantised."""
        return {0: whole_layout(self._loaded.tensors)}

    def _tensors_to_write(self) -> Mapping[str, torch.Tensor]:
        return self._loaded.tensors

    def _apply(self, update: Update, cache: CachePolicy) -> str:
        update.apply()
        self._loaded.dequantise()
        if self._packed is not None:
            self._packed.pack()
            if self._graphs is not None:
                self._graphs.drop()
        self._scheduler.mark(update.version)
        if self._prompts is not None:
            self._prompts.forget()
        if cache == "recompute":
            self._scheduler.requeue()
        # Hashed here, before the next step: nothing is generated with weights that were not attested.
        if self._packed is not None:
            self._packed.check()
        return self._loaded.digest()

    def _free(self) -> None:
        self._scheduler.requeue()
        self._cache.clear()
        if self._graphs is not None:
            self._graphs.drop()
        if self._prompts is not None:
            self._prompts.forget()
        if self._packed is not None:
            self._packed.clear()
        super()._free()

    def _weights_memory(self) -> Storages:
        return self._loaded.storages()

    # -- scoring ------------------------------------------------------------------------------------------------------

    def score(self, payloads: Sequence[Payload], *, temperature: float) -> list[torch.Tensor]:
        """float32 log-probs [N] of each payload's completion under the loaded weights, on the CPU.

        Raises:
            EngineError: `temperature` is not above 0, or a payload has no prompt, is too long, has ids outside the
                vocabulary, or shows what cannot be entered.
        """
        if not temperature > 0:
            raise EngineError(f"cannot score at temperature {temperature}: it must be above 0")
        sequences = scoring_inputs(
            payloads, self._context.model, context_length=self._context.context_length, vocabulary=self._vocabulary
        )
        budget = self._options.prefill_units
        return self._computed(lambda: self._runner.score(sequences, temperature=temperature, budget=budget))


class Recorder:
    """Keeps the records of one module's forwards, with the sequences whose units they computed.

    A unit's record stands beside its entry in the KV cache: written when that is written, copied when a sample starts
    from what another holds, replaced when it is computed anew. It lies in the CPU's memory, so that it outlives its
    slot: a sequence that ends between an update and its recompute still has all of it.
    """

    def __init__(self, model: MoEModel, module: torch.nn.Module) -> None:
        self._records = tuple(model.records())
        self._newest = model.record(module)

    @staticmethod
    def of(model: Model, module: torch.nn.Module) -> Recorder | None:
        """A recorder; None where the model records nothing."""
        return Recorder(model, module) if isinstance(model, MoEModel) and model.records() else None

    def keep(self, plan: Plan) -> None:
        """Keep what the newest forward recorded, which was that of `plan`."""
        newest = self._newest()
        num_units = plan.num_decoding + len(plan.chunk_tokens)
        for record in self._records:
            rows = _checked(newest, record, num_units).cpu()
            for slot, kept in plan.resumed:
                before = kept.records[record.name][: kept.num_units]
                _held(plan.sequences[slot], record.name, rows)[: kept.num_units] = before
            for row, sequence in enumerate(plan.sequences[: plan.num_decoding]):
                _held(sequence, record.name, rows)[len(sequence.tokens) - 1] = rows[row]
            for chunk in plan.chunks:
                held = _held(plan.sequences[chunk.slot], record.name, rows)
                held[chunk.start : chunk.start + chunk.last - chunk.first] = rows[chunk.first : chunk.last]
            for fork in plan.forks:
                shared = plan.sequences[fork.source].records[record.name][: fork.num_units]
                for target in fork.targets:
                    _held(plan.sequences[target], record.name, rows)[: fork.num_units] = shared


def _held(sequence: TokenSequence, name: str, like: torch.Tensor) -> torch.Tensor:
    """The record of a sequence, with room for every unit that it may feed."""
    if name not in sequence.records:
        most = sequence.parent.num_prompt + sequence.parent.request.sampling.max_units - 1
        sequence.records[name] = like.new_empty(most, *like.shape[1:])
    return sequence.records[name]


def _checked(newest: Mapping[str, torch.Tensor], record: Record, num_units: int) -> torch.Tensor:
    rows = newest.get(record.name)
    found = None if rows is None else (dtype_name(rows.dtype), tuple(rows.shape))
    expected = (record.dtype, (num_units, *record.shape))
    if rows is None or found != expected:
        raise EngineError(f"the model recorded {record.name!r} as {found} of a forward; it declared {expected}")
    return rows
