"""The engine that is tested: the trainer's prices, calls in time, requests, and what results must be.

Shape legend: N decisions of a completion, V tokens of the vocabulary.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any, ClassVar, Final, TypeAlias, TypeVar, final

import attrs
import torch

from cosmos_core.errors import CosmosError, DataError, EngineError
from cosmos_core.models.tokens import token_array
from cosmos_core.protocols import (
    CachePolicy,
    EngineCapabilities,
    FinishReason,
    Generated,
    Handle,
    Model,
    Request,
    RolloutEngine,
    Sampling,
    TensorSlice,
)
from cosmos_core.protocols.quantization import Format
from cosmos_core.testing.conformance.model.subject import by_payload, tensor_of
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.threads import begin
from cosmos_core.types import JSON, Payload
from cosmos_core.weights import slices
from cosmos_core.weights.quantization import dequantise, quantise
from cosmos_core.weights.shards import canonical_tensors, torch_dtype

_BUDGET: Final = 1 << 14
_NOISE: Final = 0.3

Record: TypeAlias = Callable[[torch.nn.Module], Callable[[], Mapping[str, torch.Tensor]]]
"""Makes a module record: see `MoEModel.record`."""


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
        try:
            batches = self._model.pack(payloads, budget=_BUDGET)
        except DataError as error:
            fault(f"the trainer refuses a payload: {error}")
        with torch.no_grad():
            decided = [self._model.decide(self._module(weights), each, temperature=temperature) for each in batches]
        return by_payload(len(payloads), batches, [each.logprobs_N for each in decided])

    def next_logprobs(self, prompt: Payload, tokens: Sequence[int], *, temperature: float) -> torch.Tensor:
        """float32 log-probs [V] of what may follow a prompt and the first tokens of a completion."""
        vocabulary = range(self._model.facts().vocab_size)
        payloads = [
            attrs.evolve(prompt, arrays={**prompt.arrays, "completion": token_array([*tokens, token])})
            for token in vocabulary
        ]
        return torch.stack([each[-1] for each in self.logprobs(payloads, temperature=temperature)])

    def recorded(self, payload: Payload, record: Record, weights: int) -> Mapping[str, torch.Tensor]:
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
            tensors = canonical_tensors(module)
            if weights:
                generator = torch.Generator().manual_seed(weights)
                for tensor in tensors.values():
                    tensor.mul_(1.0 + _NOISE * torch.randn(tensor.shape, generator=generator))
            if (form := self._form) is not None:
                for name in self._model.facts().matrices:
                    codes, columns = quantise(form, name, tensors[name]), tensors[name].shape[-1]
                    tensors[name].copy_(dequantise(form, name, codes, columns))
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


T = TypeVar("T")
Part: TypeAlias = tuple[int, TensorSlice, str]
"""(rank, slice, dtype) of a layout."""
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
        limit_s = self._start_timeout_s if name == "start" else self._timeout_s

        def call(*args: Any, **kwargs: Any) -> Any:
            shown = ", ".join(repr(each) for each in args if isinstance(each, str))
            return self._within(limit_s, f"{name}({shown})", method, *args, **kwargs)

        return call

    def results(self, handle: Handle) -> list[Generated]:
        """The results of a request.

        Raises:
            EngineError: The engine failed it.
        """
        name, limit_s = handle.request.request_id, self._timeout_s
        try:
            return self._within(limit_s + 1.0, f"result() of request {name!r}", handle.result, limit_s)
        except TimeoutError:
            fault(
                f"request {name!r} is not finished after {limit_s:g} s; every request that enters must end, whatever "
                "happens to it. (A slow engine: raise timeout_s of the test class.)"
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
        if any(map(self.is_done, handles)):
            fault("a request was finished before it could be paused; raise long_units of the test class")
        return int(self.stats().generated_units)

    def is_done(self, handle: Handle) -> bool:
        """True if a request has ended."""
        what = f"result(0.0) of request {handle.request.request_id!r}"
        try:
            self._within(self._timeout_s, what, handle.result, 0.0)
        except TimeoutError:
            return False
        except EngineError:
            pass
        return True

    def load(self, version: int, tensors: Mapping[str, torch.Tensor], cache: CachePolicy = "keep") -> str:
        """Load whole weights; returns the digest that the engine tells."""
        self.begin_update(version)
        self.write_all(tensors, self.parts())
        return str(self.commit_update(cache))

    def parts(self, number: int = 1) -> list[Part]:
        """The layout, each slice in so many parts."""
        return [
            (rank, part, dtype)
            for rank, held in self.layout().items()
            for piece, dtype in held
            for part in slices.chunks(piece, max(1, slices.size(piece) // number))
        ]

    def write_all(self, tensors: Mapping[str, torch.Tensor], parts: Iterable[Part]) -> None:
        """Write parts of the layout."""
        for rank, piece, dtype in parts:
            tensor = tensors[piece.name]
            place = slices.within(piece, slices.whole(piece.name, tuple(tensor.shape)))
            self.write(rank, piece, tensor[place].to(torch_dtype(dtype)).contiguous())

    @staticmethod
    def _within(timeout_s: float, what: str, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        answer = begin(partial(call, *args, **kwargs), f"kit:{what}")
        wait([answer], timeout_s)
        if answer.done():
            return answer.result()
        return fault(f"{what} did not return in {timeout_s:g} s; it must never wait for what cannot happen")


def refuses(error: type[CosmosError], what: str, call: Callable[..., object], *arguments: Any, **more: Any) -> None:
    """Fault a call of which `what` tells what is wrong, unless the engine refuses it with this error."""
    try:
        call(*arguments, **more)
    except error:
        return
    except Exception as other:  # noqa: BLE001 - whatever it is, it is the fault
        fault(f"{what} raised {type(other).__name__} ({other}); raise {error.__name__} with what is wrong")
    fault(f"{what} was accepted; raise {error.__name__}")


Start: TypeAlias = Callable[..., EngineDriver]

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
    """Reads an engine's results, with limits of time and tolerances; see `EngineConformance`."""

    timeout_s: ClassVar[float] = 20.0
    tolerance: ClassVar[float] = 1e-4
    long_units: ClassVar[int] = 160
    # At 1, wrong semantics would not show.
    temperature: ClassVar[float] = 0.7
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
        return tensor_of(generated.payload, "logprobs")

    def versions(self, generated: Generated) -> list[int]:
        """The weight version of each unit."""
        return [int(each) for each in tensor_of(generated.payload, "versions")]

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

    @property
    def texts(self) -> list[int]:
        """The numbers of prompts that are nothing but tokens."""
        return [index for index, prompt in enumerate(self.prompts) if prompt.arrays.keys() == {"prompt"}]

    def request(self, name: object, prompt: int | Payload, *, seed: int = 0, priority: int = 0, **more: Any) -> Request:
        """A request for a prompt, or the one of a number; 8 units at `temperature` unless said otherwise."""
        drawn = Sampling(**{"temperature": self.read.temperature, "max_units": 8, **more})
        given = self.prompts[prompt] if isinstance(prompt, int) else prompt
        return Request(request_id=str(name), prompt=given, sampling=drawn, seed=seed, priority=priority)

    def next_turns(self, results: Sequence[Generated]) -> list[Request]:
        """A next turn for each completion of a text: all that came before, and some tokens."""
        turns = []
        for index, each in enumerate(results):
            said = token_array([*tokens_of(each, "prompt"), *tokens_of(each), *range(3 + index % 4)])
            whole = attrs.evolve(each.payload, arrays={"prompt": said})
            turns.append(self.request(f"turn {index}", whole, seed=index))
        return turns

    def long(self, count: int, **more: Any) -> list[Request]:
        """Requests that are long enough to be paused, aborted or updated in flight."""
        each = {"max_units": self.read.long_units, **more}
        return [self.request(index, index % len(self.prompts), seed=index, **each) for index in range(count)]

    def ragged(self, shortest: int, **more: Any) -> list[Request]:
        """A request for each prompt, each longer than the one before."""
        lengths = range(shortest, shortest + 4 * len(self.prompts), 4)
        return [self.request(n, n, seed=n, max_units=length, **more) for n, length in enumerate(lengths)]

    def alternatives(
        self, request: Request, generated: Generated, temperature: float
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(unit, token, log-probs [V] of all tokens there) of a completion."""
        tokens = tokens_of(generated)
        for unit, token in enumerate(tokens):
            yield unit, token, self.pricer.next_logprobs(request.prompt, tokens[:unit], temperature=temperature)

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
                hint = "check positions, caches, the temperature and which weights are loaded"
                if (found - other).abs().max() <= self.read.tolerance:
                    actual = "raw" if semantics == "processed" else "processed"
                    hint = f"they are {actual} ones: declare logprob_semantics={actual!r}"
                fault(
                    f"log-probs are not the trainer's: unit {worst}, of version {versions[worst]}, has "
                    f"{found[worst]:.4f}, the trainer says {expected[worst]:.4f} for the declared logprob_semantics "
                    f"{semantics!r} at temperature {temperature}; {hint}"
                )

    def expect_scores(
        self, engine: EngineDriver, payloads: Sequence[Payload], temperature: float, weights: int = 0
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


def expect_array(generated: Generated, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    """Fault a payload in which an array is not of this dtype and shape."""
    held = generated.payload.arrays.get(name)
    found = held and (held.dtype, held.shape)
    if found != (dtype, shape):
        fault(
            f"array {name!r} of a payload of {generated.num_units} units is {found}; it must be {dtype} {list(shape)}"
        )


def tokens_of(generated: Generated, name: str = "completion") -> list[int]:
    """The tokens of a completion, or of its prompt."""
    return [int(token) for token in tensor_of(generated.payload, name)]


def flat(results: Iterable[Sequence[Generated]]) -> list[Generated]:
    """The completions of several requests."""
    return [generated for each in results for generated in each]
