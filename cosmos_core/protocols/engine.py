"""The protocol of rollout engines: generate for requests in flight while weights change under them.

One engine a rollout replica. Its methods may be called from any thread; it runs on a thread or processes of its own and
drains a queue of commands between two steps, so that each takes effect between two units.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

import attrs

from cosmos_core.protocols.quantization import Quantization
from cosmos_core.types import Payload

if TYPE_CHECKING:
    import torch

    from cosmos_core.protocols.model import Model

PauseMode: TypeAlias = Literal["keep", "abort", "wait"]
CachePolicy: TypeAlias = Literal["keep", "recompute"]


class FinishReason(enum.StrEnum):
    """The reason for which a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@attrs.frozen(kw_only=True)
class Sampling:
    """The sampling of completions. `temperature = 0` is greedy and needs `num_samples = 1`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_units: int = 256
    num_samples: int = 1


@attrs.frozen(kw_only=True, eq=False)
class Request:
    """One prompt to complete `sampling.num_samples` times.

    Attributes:
        request_id: Unique among requests in flight.
        prompt: The conditioning payload (`Model.encode`).
        sampling: How to draw.
        seed: Draws of sample i, unit j depend on (seed, i, j) and the logits only, never on what else is in flight.
        priority: Lower goes first among waiting requests.
    """

    request_id: str
    prompt: Payload
    sampling: Sampling
    seed: int
    priority: int = 0


@attrs.frozen(kw_only=True, eq=False)
class Generated:
    """One finished completion.

    Attributes:
        payload: Prompt and completion with log-probs and versions (see `Payload`).
        reason: Why it ended. An aborted one holds the partial result.
        oldest_version: Oldest weight version among its units.
        newest_version: Newest weight version among its units.
        num_units: Generated units: decisions that the payload has.
        media: What it looks like, of an engine that `renders`, for rewards and reports: a payload of kind `media`.
    """

    payload: Payload
    reason: FinishReason
    oldest_version: int
    newest_version: int
    num_units: int
    media: Payload | None = None


class Handle(Protocol):
    """A request in flight."""

    @property
    def request(self) -> Request:
        """The request."""

    def result(self, timeout_s: float | None = None) -> list[Generated]:
        """Wait for all samples, in the order of their index.

        Raises:
            TimeoutError: Not finished in time.
            EngineError: The engine refused or failed the request.
        """

    def add_done_callback(self, callback: Callable[[Handle], None]) -> None:
        """Call `callback(self)` once finished, on the engine's thread (at once if it is already)."""


@attrs.frozen(kw_only=True)
class EngineCapabilities:
    """The features that an engine supports; what is not declared is refused.

    Attributes:
        payload_kinds: Kinds of payload that it generates.
        media: Whether it takes prompts that show images or videos, in arrays of the payload that the model plugin adds.
        renders: Whether it gives `Generated.media`, too, which rewards of payloads of kind `media` score.
        records: Whether it keeps what a model's forwards record (`MoEModel`), and adds it to payloads.
        mesh_axes: Axes of `[rollout.mesh]` that may be greater than one.
        only_alone: Names of fields whose features it has not where an axis of its mesh is greater than one.
        quantizations: Formats beside `none` in which it holds the matrices of `ModelFacts.matrices`.
        in_flight_update: Whether weights may change while requests are in flight.
        prefix_sharing: Whether the samples of a request process their prompt once.
        compresses_cache: Whether it caches latent attention's latents (`ModelFacts.compressed_cache_size`), not heads.
        cache_page: Units by which the KV cache of a sequence grows on a GPU.
        replays_steps: Whether it replays steps on a GPU as CUDA graphs, which keep what a step computes in between.
        sleeps: Whether it is a `SleepingEngine`, which `rollout.placement = "colocated"` needs.
        seeded: Whether a request's draws depend on its seed alone, with any options and on any device.
        logprob_semantics: `processed`: log-probs of what was sampled from; `raw`: before temperature, top-k and top-p.
    """

    payload_kinds: frozenset[str] = frozenset({"tokens"})
    media: bool = False
    renders: bool = False
    records: bool = False
    mesh_axes: frozenset[str] = frozenset()
    only_alone: frozenset[Literal["media", "records", "quantizations"]] = frozenset()
    quantizations: frozenset[Quantization] = frozenset()
    in_flight_update: bool = True
    prefix_sharing: bool = False
    compresses_cache: bool = False
    cache_page: int = 1
    replays_steps: bool = False
    sleeps: bool = False
    seeded: bool = True
    logprob_semantics: str = "processed"


@attrs.frozen(kw_only=True, eq=False)
class EngineContext:
    """The parts that an engine is made with, by the recipe and the replica.

    Attributes:
        model: The model plugin's instance (config, tokenizer, `build`).
        dtype: Weights' dtype.
        device: Where to run.
        max_in_flight: Most sequences decoding at once.
        context_length: Units of the longest prompt and completion together.
        seed: `run.seed`, for `Model.build`.
        replica: Name and incarnation of the replica: draws of an engine's own depend on it, too.
        quantization: Format of the matrices of `ModelFacts.matrices`; products are computed in `dtype` or better.
        tensor_parallel: `rollout.mesh.tp`: processes of the engine's own that share each layer.
        sleeps: Whether it will be told to sleep.
        dialogues: Whether requests are turns of dialogues: the prompt of the next is all that came before.
    """

    model: Model
    dtype: torch.dtype
    device: torch.device
    max_in_flight: int
    context_length: int
    seed: int
    replica: str = ""
    quantization: Quantization = "none"
    tensor_parallel: int = 1
    sleeps: bool = False
    dialogues: bool = False


@attrs.frozen(kw_only=True)
class EngineStats:
    """Counters since the start, and gauges.

    Attributes:
        prompt_units: Units of prompts that were processed.
        cached_units: Those that were not, since an earlier request had left them in the cache.
        evicted_units: Units that gave way there to others.
        preempted: Sequences that the cache had no more room for, each time that one waited again.
    """

    num_running: int
    num_waiting: int
    generated_units: int
    prompt_units: int
    busy_s: float
    paused_s: float
    weight_version: int
    cached_units: int = 0
    evicted_units: int = 0
    preempted: int = 0


@attrs.frozen(kw_only=True)
class TensorSlice:
    """A box of a canonical (Hugging Face) tensor.

    Attributes:
        name: Canonical name.
        start: First index in each dim.
        shape: Size in each dim.
    """

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


class RolloutEngine(Protocol):
    """Generates. A pause is a queue that is not drained: nothing in flight is lost."""

    def start(self) -> None:
        """Build the model (weights from `Model.build`, version 0) and begin to serve."""

    def shutdown(self) -> None:
        """Stop; unfinished requests end as aborted. Idempotent."""

    def submit(self, requests: Sequence[Request]) -> list[Handle]:
        """Queue requests; those of one call enter together.

        Raises:
            EngineError: A request does not fit `context_length` or asks for what the engine cannot do.
        """

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests at the next unit, partial results kept; unknown ids are ignored."""

    def pause(self, mode: PauseMode = "keep") -> None:
        """Return when nothing generates: `keep` holds what is in flight, `abort` ends it, `wait` finishes it."""

    def resume(self) -> None:
        """Go on after `pause`."""

    def layout(self) -> Mapping[int, Sequence[tuple[TensorSlice, str]]]:
        """For each rank, the slices of canonical tensors that it holds and their torch dtype names.

        With a quantization, a matrix is the tensors of its codes and scales (`Format.tensors`).
        """

    def begin_update(self, version: int) -> None:
        """Open an update to `version`.

        Raises:
            WeightSyncError: An update is open already. Any version may be loaded over any, the same or an older one.
        """

    def write(self, rank: int, piece: TensorSlice, data: torch.Tensor) -> None:
        """Give the content of one slice; `data` must stay unchanged until the commit or abort."""

    def commit_update(self, cache: CachePolicy = "keep") -> str:
        """Copy everything written between two units, and go on with `version`.

        Returns:
            The digest of what is now loaded (`cosmos_core.weights.digest`), read back from the loaded weights.

        Raises:
            WeightSyncError: The slices written do not cover the layout; nothing was copied.
            AttestationError: What is loaded now is not what was written, whatever the digest would say.
        """

    def abort_update(self) -> None:
        """Forget an open update; what is loaded stays."""

    def score(self, payloads: Sequence[Payload], *, temperature: float) -> list[torch.Tensor]:
        """float32 log-probs [N] of each payload's completion under the loaded weights."""

    def stats(self) -> EngineStats:
        """Counters and gauges, cheap."""

    def health(self) -> None:
        """Return if the engine can serve.

        Raises:
            EngineLostError: A process that it needs was killed, or does not answer: another replica takes its place.
            EngineError: It cannot for any other reason (the engine thread's error chained): the run ends with it.
        """


@runtime_checkable
class SleepingEngine(RolloutEngine, Protocol):
    """Gives the memory of its device up for a while (`EngineCapabilities.sleeps`), so that others may use it."""

    def sleep(self) -> None:
        """Free weights and caches; what is in flight stays, and computes its cache anew when it goes on. Idempotent.

        Raises:
            EngineError: It is not paused.
        """

    def wake(self) -> None:
        """Take the memory again. Idempotent.

        No weights are loaded then: until an update was committed, `resume` and `score` raise an EngineError, and so
        do `resume`, `score` and `commit_update` of one that sleeps.
        """
