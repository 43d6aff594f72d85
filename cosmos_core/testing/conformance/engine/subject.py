"""The engine that is tested: the trainer's prices, calls in time, requests, and what results must be."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent import futures
from typing import Any, ClassVar, Final, TypeAlias, TypeVar, final

import attrs
import numpy as np
import torch

from cosmos_core.errors import CosmosError, EngineError
from cosmos_core.models.tokens import token_array
from cosmos_core.protocols import (
    CachePolicy,
    EngineCapabilities,
    FinishReason,
    Generated,
    Handle,
    Model,
    PauseMode,
    Request,
    RolloutEngine,
    Sampling,
)
from cosmos_core.protocols.quantization import Format
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import JSON, Payload
from cosmos_core.weights import slices
from cosmos_core.weights.quantization import dequantise, quantise
from cosmos_core.weights.shards import canonical_tensors, torch_dtype

_BUDGET: Final = 1 << 14
_NOISE: Final = 0.3


@final
class Pricer:
    """Prices completions with `Model.decide`, in float32 on the CPU.

    Weights have numbers: 0 are those that `Model.build` gives, any other number is a random change of them. With a
    format, matrices are what their codes and scales stand for.
    """

    def __init__(self, model: Model, *, seed: int, form: Format | None = None) -> None:
        self._model: Final = model
        self._seed: Final = seed
        self._form: Final = form
        self._modules: Final[dict[int, torch.nn.Module]] = {}

    def tensors(self, weights: int) -> dict[str, torch.Tensor]:
        """The canonical tensors of these weights."""
        return canonical_tensors(self._module(weights))

    def logprobs(self, payloads: Sequence[Payload], *, temperature: float, weights: int = 0) -> list[torch.Tensor]:
        """float32 log-probs [N] of each payload's completion."""
        found: list[list[torch.Tensor]] = [[] for _ in payloads]
        for batch in self._model.pack(payloads, budget=_BUDGET):
            with torch.no_grad():
                decided = self._model.decide(self._module(weights), batch, temperature=temperature)
            parts = torch.split(decided.logprobs_N, list(batch.num_decisions))
            for index, part in zip(batch.sequences, parts, strict=True):
                found[index].append(part)
        return [torch.cat(parts) if parts else torch.zeros(0) for parts in found]

    def next_logprobs(self, prompt: Payload, tokens: Sequence[int], *, temperature: float) -> torch.Tensor:
        """float32 log-probs [V] of what may follow a prompt and the first tokens of a completion."""
        vocabulary = range(self._model.facts().vocab_size)
        payloads = [
            attrs.evolve(prompt, arrays={**prompt.arrays, "completion": token_array([*tokens, token])})
            for token in vocabulary
        ]
        return torch.stack([each[-1] for each in self.logprobs(payloads, temperature=temperature)])

    def recorded(
        self,
        payload: Payload,
        record: Callable[[torch.nn.Module], Callable[[], Mapping[str, torch.Tensor]]],
        *,
        weights: int = 0,
    ) -> Mapping[str, torch.Tensor]:
        """Records of one forward of a prompt and completion, of each unit but the last."""
        module = copy.deepcopy(self._module(weights))
        newest = record(module)
        (batch,) = self._model.pack([payload], budget=_BUDGET)
        with torch.no_grad():
            self._model.decide(module, batch, temperature=1.0)
        return newest()

    def _module(self, weights: int) -> torch.nn.Module:
        if weights not in self._modules:
            module = self._model.build(seed=self._seed, dtype=torch.float32, device=torch.device("cpu"))
            if weights:
                _disturb(module, weights)
            if self._form is not None:
                _round(module, self._form, self._model.facts().matrices)
            self._modules[weights] = module
        return self._modules[weights]


def stopping_at(model: Model, stop_ids: Collection[int]) -> Model:
    """The same model with other stop ids: with none of them, completions are as long as they may be."""
    facts = attrs.evolve(model.facts(), stop_ids=frozenset(stop_ids))
    return twin(model, facts=lambda _: facts)


def twin(model: Model, **methods: Callable[..., Any]) -> Model:
    """The same model with other methods."""
    # A subclass of the same layout, so that the twin passes as what it is, however its class was made.
    twin_class = type(type(model).__name__, (type(model),), {"__slots__": (), **methods})
    other = copy.copy(model)
    object.__setattr__(other, "__class__", twin_class)
    return other


def _disturb(module: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in canonical_tensors(module).values():
            tensor.mul_(1.0 + _NOISE * torch.randn(tensor.shape, generator=generator))


def _round(module: torch.nn.Module, form: Format, matrices: Mapping[str, tuple[int, ...]]) -> None:
    tensors = canonical_tensors(module)
    for name in matrices:
        columns = tensors[name].shape[-1]
        tensors[name].copy_(dequantise(form, name, quantise(form, name, tensors[name]), columns))


T = TypeVar("T")

_POLL_S: Final = 0.001


@final
class EngineDriver:
    """An engine whose calls must return in time.

    Attributes:
        engine: The engine itself, for callbacks on its own thread.
    """

    def __init__(self, engine: RolloutEngine, *, timeout_s: float, start_timeout_s: float) -> None:
        self.engine: Final = engine
        self._timeout_s: Final = timeout_s
        self._start_timeout_s: Final = start_timeout_s

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method of the engine, in time."""
        method = getattr(self.engine, name)
        return lambda *args, **kwargs: self._within(self._timeout_s, f"{name}()", lambda: method(*args, **kwargs))

    def start(self) -> None:
        """Start the engine."""
        self._within(self._start_timeout_s, "start()", self.engine.start)

    def pause(self, mode: PauseMode = "keep") -> None:
        """Pause the engine."""
        self._within(self._timeout_s, f"pause({mode!r})", lambda: self.engine.pause(mode))

    def results(self, handle: Handle) -> list[Generated]:
        """The results of a request.

        Raises:
            EngineError: The engine failed it.
        """
        name = handle.request.request_id
        try:
            return self._within(
                self._timeout_s + 1.0, f"result() of request {name!r}", lambda: handle.result(self._timeout_s)
            )
        except TimeoutError:
            fault(
                f"request {name!r} is not finished after {self._timeout_s:g} s; every request that enters must end, "
                "whatever happens to it. (A slow engine: raise timeout_s of the test class.)"
            )

    def generate(self, requests: Sequence[Request]) -> list[list[Generated]]:
        """Generate with requests that enter together."""
        return [self.results(handle) for handle in self.submit(requests)]

    def wait_for_units(self, units: int) -> None:
        """Wait until the engine has generated so many units since its start."""
        end = time.monotonic() + self._timeout_s
        while (made := self.stats().generated_units) < units:
            if time.monotonic() > end:
                fault(f"stats().generated_units stays at {made}; {units} units were asked for and more are in flight")
            time.sleep(_POLL_S)

    def pause_in_flight(self, handles: Sequence[Handle], units: int) -> int:
        """Pause once so many units were generated, while all requests are still unfinished; the units made by then."""
        self.wait_for_units(units)
        self.pause("keep")
        for handle in handles:
            if self.is_done(handle):
                fault("a request was finished before it could be paused; raise long_units of the test class")
        return int(self.stats().generated_units)

    def is_done(self, handle: Handle) -> bool:
        """True if a request has ended."""
        what = f"result(0.0) of request {handle.request.request_id!r}"
        try:
            self._within(self._timeout_s, what, lambda: handle.result(0.0))
        except TimeoutError:
            return False
        except EngineError:
            return True
        return True

    def load(self, version: int, tensors: Mapping[str, torch.Tensor], cache: CachePolicy = "keep") -> str:
        """Load whole weights; returns the digest that the engine tells."""
        self.begin_update(version)
        self.write_all(tensors)
        return str(self.commit_update(cache))

    def write_all(self, tensors: Mapping[str, torch.Tensor], *, skip: int = 0) -> None:
        """Write every slice of the layout but the first `skip`."""
        for rank, held in self.layout().items():
            for piece, dtype in held[skip:]:
                box = slices.within(piece, slices.whole(piece.name, tuple(tensors[piece.name].shape)))
                self.write(rank, piece, tensors[piece.name][box].to(torch_dtype(dtype)).contiguous())

    def _within(self, timeout_s: float, what: str, call: Callable[[], T]) -> T:
        answer: futures.Future[T] = futures.Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:  # noqa: BLE001 - it is raised again in the test
                answer.set_exception(error)

        threading.Thread(target=run, name=f"kit:{what}", daemon=True).start()
        done, _ = futures.wait([answer], timeout_s)
        if done:
            return answer.result()
        return fault(f"{what} did not return in {timeout_s:g} s; it must never wait for what cannot happen")


def refuses(error: type[CosmosError], call: Callable[[], object], what: str) -> str:
    """Check that the engine refuses a call with this error; returns its message.

    Args:
        error: What must be raised.
        call: The call.
        what: What is wrong with it, for the fault: "a request that ...".
    """
    try:
        call()
    except error as refusal:
        return str(refusal)
    except Exception as other:  # noqa: BLE001 - whatever it is, it is the fault
        fault(f"{what} raised {type(other).__name__} ({other}); raise {error.__name__} with what is wrong")
    return fault(f"{what} was accepted; raise {error.__name__}")


Start: TypeAlias = Callable[..., EngineDriver]

TEMPERATURE: Final = 0.7
"""Of every request, unless a test says otherwise: at 1, wrong semantics would not show."""

TINY: Final[Mapping[str, JSON]] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    # Large, so that the distributions of random weights are far from flat.
    "initializer_range": 0.3,
}


class Readings:
    """How an engine's results are read, and in how much time and how exactly; see `EngineConformance`."""

    timeout_s: ClassVar[float] = 20.0
    tolerance: ClassVar[float] = 1e-4
    long_units: ClassVar[int] = 160
    temperature: ClassVar[float] = TEMPERATURE
    whole: ClassVar[FinishReason] = FinishReason.LENGTH
    has_cache: ClassVar[bool] = True

    def decisions(self, max_units: int) -> int:
        """Number of decisions that a request with so many units comes to."""
        return max_units

    def draws_at(self, temperature: float) -> bool:  # noqa: ARG002 - for those that do not at all of them
        """True if there are samples of a temperature."""
        return True

    def logprobs(self, generated: Generated) -> torch.Tensor:
        """The engine's log-prob of each unit, float32 [N]."""
        return torch.from_numpy(np.frombuffer(generated.payload.arrays["logprobs"].data, np.float32).copy())

    def versions(self, generated: Generated) -> list[int]:
        """The weight version of each unit."""
        return [int(each) for each in np.frombuffer(generated.payload.arrays["versions"].data, np.int32)]

    def content(self, generated: Generated) -> bytes:
        """The generated content, to compare one completion with another."""
        return bytes(generated.payload.arrays["completion"].data)

    def same(self, generated: Generated, other: Generated) -> bool:
        """True if two completions are one."""
        return self.content(generated) == self.content(other)


@attrs.frozen(kw_only=True, eq=False)
class Subject:
    """The engine that is tested: how to start it, what to ask of it, and what its results must be.

    Attributes:
        start: Starts an engine, with changes of its context if given, and shuts down the one before.
        pricer: The same weights, as the trainer evaluates them.
        prompts: Prompts of different lengths, five at least.
        capabilities: The engine's declaration.
        read: How results are read.
    """

    start: Start
    pricer: Pricer
    prompts: list[Payload]
    capabilities: EngineCapabilities
    read: Readings

    @property
    def has_tokens(self) -> bool:
        """True if what it generates are tokens."""
        return "tokens" in self.capabilities.payload_kinds

    def request(self, name: object, prompt: int | Payload, *, seed: int = 0, priority: int = 0, **more: Any) -> Request:
        """A request for a prompt, or the one of a number; 8 units at `temperature` unless said otherwise."""
        drawn = Sampling(**{"temperature": self.read.temperature, "max_units": 8, **more})
        given = self.prompts[prompt] if isinstance(prompt, int) else prompt
        return Request(request_id=str(name), prompt=given, sampling=drawn, seed=seed, priority=priority)

    def long(self, count: int, **more: Any) -> list[Request]:
        """Requests that are long enough to be paused, aborted or updated in flight."""
        each = {"max_units": self.read.long_units, **more}
        return [self.request(index, index % len(self.prompts), seed=index, **each) for index in range(count)]

    def expect_logprobs(
        self,
        results: Sequence[Generated],
        *,
        weights: int = 0,
        temperature: float | None = None,
        version: int | None = None,
    ) -> None:
        """Fault log-probs (of the units of a version, or of all) that are not the trainer's under these weights."""
        semantics = self.capabilities.logprob_semantics
        temperature = self.read.temperature if temperature is None else temperature
        at, otherwise = (temperature, 1.0) if semantics == "processed" else (1.0, temperature)
        payloads = [each.payload for each in results]
        priced = self.pricer.logprobs(payloads, temperature=at, weights=weights) if payloads else []
        for generated, expected in zip(results, priced, strict=True):
            found = self.read.logprobs(generated)
            if found.shape != expected.shape:
                fault(f"a completion of {len(expected)} decisions has {len(found)} log-probs; give one for each")
            apart = (found - expected).abs()
            versions = self.read.versions(generated)
            if version is not None:
                apart = apart.masked_fill(torch.tensor(versions, dtype=torch.int64) != version, 0.0)
            if apart.numel() and not apart.max() <= self.read.tolerance:
                worst = int(apart.argmax())
                (other,) = self.pricer.logprobs([generated.payload], temperature=otherwise, weights=weights)
                fault(
                    f"log-probs are not the trainer's: unit {worst}, of version {versions[worst]}, has "
                    f"{found[worst]:.4f}, the trainer says {expected[worst]:.4f} for the declared logprob_semantics "
                    f"{semantics!r} at temperature {temperature}{_hint(found, other, semantics, self.read.tolerance)}"
                )

    def expect_scores(
        self, engine: EngineDriver, payloads: Sequence[Payload], *, temperature: float, weights: int = 0
    ) -> None:
        """Fault what `score` gives for completions if it is not the trainer's log-probs."""
        scores = engine.score(payloads, temperature=temperature)
        for index, expected in enumerate(self.pricer.logprobs(payloads, temperature=temperature, weights=weights)):
            found = scores[index].cpu()
            if found.shape != expected.shape or not (found - expected).abs().max() <= self.read.tolerance:
                fault(
                    f"score() of payload {index} at temperature {temperature} gives {found.tolist()}; the trainer "
                    f"says {expected.tolist()}; price it under the loaded weights, after the temperature"
                )

    def expect_whole(self, results: Sequence[Generated], what: str, units: int = 0) -> None:
        """Fault completions that are not as long as they were asked to be, a long one's length unless given."""
        wanted = self.read.decisions(units or self.read.long_units)
        for generated in results:
            if generated.num_units != wanted or generated.reason is not self.read.whole:
                fault(
                    f"a request that {what} ended with {generated.reason} and {generated.num_units} of {wanted} units; "
                    "nothing may be lost"
                )

    def expect_versions(self, results: Sequence[Generated], allowed: set[int]) -> None:
        """Fault versions of units that were never loaded, that go down, or that the result sums up wrongly."""
        for generated in results:
            versions = self.read.versions(generated)
            if len(versions) != generated.num_units or versions != sorted(versions) or not set(versions) <= allowed:
                fault(f"versions of a completion's units are {versions}; {sorted(allowed)} were loaded, in that order")
            ends = (generated.oldest_version, generated.newest_version)
            if ends != (min(versions), max(versions)):
                fault(f"oldest and newest version are {ends}, those of the units {(min(versions), max(versions))}")


def tokens_of(generated: Generated) -> list[int]:
    """The tokens of a completion."""
    return list(memoryview(generated.payload.arrays["completion"].data).cast("B").cast("i"))


def flat(results: Iterable[Sequence[Generated]]) -> list[Generated]:
    """The completions of several requests."""
    return [generated for each in results for generated in each]


def _hint(found: torch.Tensor, other: torch.Tensor, semantics: str, tolerance: float) -> str:
    if found.shape != other.shape or not (found - other).abs().max() <= tolerance:
        return "; check positions, caches, the temperature and which weights are loaded"
    actual = "raw" if semantics == "processed" else "processed"
    return f"; they are {actual} ones: declare logprob_semantics={actual!r}"
