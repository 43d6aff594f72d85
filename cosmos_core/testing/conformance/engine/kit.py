"""The kit for engines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Final

import attrs
import pytest
import torch

from cosmos_core.config.structure import structure
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import (
    EngineCapabilities,
    EngineContext,
    Kind,
    Model,
    ModelContext,
    PlannedRun,
    Preflight,
    Provider,
    RolloutEngine,
)
from cosmos_core.run.planning.checks import supported
from cosmos_core.testing.conformance.engine.flight import FlightTests
from cosmos_core.testing.conformance.engine.generation import GenerationTests
from cosmos_core.testing.conformance.engine.subject import TINY, EngineDriver, Pricer, Start, Subject, stopping_at
from cosmos_core.testing.conformance.engine.updates import UpdateTests
from cosmos_core.testing.conformance.plugin import PluginConformance, fault, needs
from cosmos_core.types import JSON, Payload, Prompt
from cosmos_core.weights.shards import dtype_name

_TOKENIZER: Final[Mapping[str, JSON]] = {"build": "byte-bpe", "vocab_size": 270, "split_digits": True}
_TEXTS: Final = ("Two and two", "Once upon a time there was", "x", "What is 6 times 7?", "A name")


class EngineConformance(GenerationTests, FlightTests, UpdateTests, PluginConformance):
    """Tests that every engine must pass: inherit it and set `plugin`.

    The engine generates with a tiny Hugging Face model from random weights on the CPU, and the trainer's own
    evaluation of that model (`Model.decide`) says what is right. Override what does not fit:

    Attributes:
        timeout_s: Longest time that one call or one request may take.
        start_timeout_s: Longest time that `start` may take.
        tolerance: Largest difference of log-probs, in float32.
        tensor_parallel: Processes that share the model's layers; an engine that declares `tp` has a second class,
            with 2, of all of this or, where each start takes many seconds, of the tests of layouts and updates that
            depend on who holds which slice.
        long_units: Units of the requests that are paused, aborted or updated in flight; raise it for an engine that
            is done with them too soon.
        impossible: Sampling of requests that must be refused, by what is wrong with them.

    Fixtures to override: `options`; `model` (class scope), the model to generate with; `prompts`, at least five
    payloads for it, of different lengths; `context`, the `EngineContext` (another device, more memory).

    For payloads that are no tokens, override how a `Generated` is read: `logprobs`, `versions`, `content`. What only
    tokens have (stop ids, greedy, top-k and top-p) is skipped then.
    """

    kind: ClassVar[Kind] = "engine"
    start_timeout_s: ClassVar[float] = 120.0

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> Model:
        """The model to generate with; a tiny `hf` model from random weights."""
        context = ModelContext(path=None, config=TINY, assets=tmp_path_factory.mktemp("model"))
        made: Model = PluginSet.load([("model", "hf")]).create("model", "hf", {}, context)
        made.prepare(_TEXTS, _TOKENIZER)
        return made

    @pytest.fixture
    def capabilities(self, provider: Provider[RolloutEngine]) -> EngineCapabilities:
        """The plugin's declaration for as many processes as these tests use."""
        return supported(provider.capabilities, self.tensor_parallel)

    @pytest.fixture
    def context(self, model: Model) -> EngineContext:
        """An engine's context; the model has no stop tokens, so that lengths are known."""
        return EngineContext(
            model=stopping_at(model, frozenset()),
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_in_flight=4,
            context_length=min(model.facts().context_length, 256),
            seed=1,
            tensor_parallel=self.tensor_parallel,
        )

    @pytest.fixture
    def prompts(self, model: Model) -> list[Payload]:
        """Prompts of different lengths, five at least."""
        return [model.encode(Prompt(text=text)) for text in _TEXTS]

    @pytest.fixture(scope="class")
    @classmethod
    def pricer(cls, model: Model) -> Pricer:
        """The same weights, as the trainer evaluates them."""
        return Pricer(model, seed=1)

    @pytest.fixture
    def start(self, plugins: PluginSet, options: Mapping[str, JSON], context: EngineContext) -> Iterator[Start]:
        """Start an engine, with changes of the context if given; it is shut down after the test or before another."""
        started: list[EngineDriver] = []

        def end() -> None:
            # What is wrong with a shutdown is told by the tests of it, not by all tests.
            with contextlib.suppress(Exception, pytest.fail.Exception):
                while started:
                    started.pop().shutdown()

        def begin(**changes: Any) -> EngineDriver:
            end()
            made = plugins.create("engine", self.plugin, options, attrs.evolve(context, **changes))
            engine = EngineDriver(made, timeout_s=self.timeout_s, start_timeout_s=self.start_timeout_s)
            started.append(engine)
            engine.start()
            return engine

        yield begin
        end()

    @pytest.fixture
    def subject(
        self, start: Start, pricer: Pricer, prompts: list[Payload], capabilities: EngineCapabilities
    ) -> Subject:
        """The engine, how it is asked, and how its results are read."""
        return Subject(start=start, pricer=pricer, prompts=prompts, capabilities=capabilities, read=self)

    @pytest.fixture
    def preflight(
        self, provider: Provider[RolloutEngine], options: Mapping[str, JSON], context: EngineContext, subject: Subject
    ) -> Callable[..., Preflight]:
        """`preflight()`: what it says of a run such as these tests generate for; or of one with some changes."""
        needs(provider.preflight, "it has no preflight (`Provider.preflight`)")
        assert provider.preflight is not None
        has_gpu = context.device.type == "cuda"
        planned = PlannedRun(
            model=context.model,
            facts=context.model.facts(),
            device="cuda" if has_gpu else "cpu",
            has_gpu=has_gpu,
            precision=dtype_name(context.dtype),
            temperatures={"rollout.sampling.temperature": 1.0},
            shows_media=False,
            num_ranks=self.tensor_parallel,
            samplings={"rollout.sampling": subject.request("one", 0).sampling},
        )
        given: Any = structure(options, provider.options, "engine.options")
        asked = provider.preflight
        return lambda **changes: asked(given, attrs.evolve(planned, **changes))

    def test_declarations_hold_together(self, capabilities: EngineCapabilities) -> None:
        """Planning relies on them."""
        if capabilities.logprob_semantics not in ("processed", "raw"):
            fault(f"logprob_semantics is {capabilities.logprob_semantics!r}; it must be 'processed' or 'raw'")
        if not capabilities.payload_kinds:
            fault("payload_kinds is empty; declare what the engine generates, such as frozenset({'tokens'})")
        if unproven := capabilities.mesh_axes - {"tp"}:
            fault(
                f"mesh_axes declares {', '.join(sorted(unproven))}; an engine is told of tp alone "
                "(EngineContext.tensor_parallel), so nothing can prove it: leave it out"
            )

    def test_its_preflight_says_nothing_against_what_it_does_here(self, preflight: Callable[..., Preflight]) -> None:
        """An engine that generates in these tests has no run to refuse, at whatever temperature it is drawn."""
        drawn = next(each for each in (0.7, 1.0) if self.draws_at(each))
        for temperatures in ({"rollout.sampling.temperature": 1.0}, {"one": 0.0, "other": drawn}):
            told, again = (preflight(temperatures=temperatures) for _ in range(2))
            if not isinstance(told, Preflight):
                fault(f"preflight() returned {told!r}; return a Preflight")
            if told != again:
                fault(f"preflight() said {told}, and of the same run {again}; it must depend on what it is given alone")
            if said := [*told.problems, *([told.absent] if told.absent else [])]:
                fault(f"preflight() refuses a run such as these tests generate for: {said[0]}")
