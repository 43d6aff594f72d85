"""The kit for engines."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final

import attrs
import pytest
import torch

from cosmos_core.config.structure import structure
from cosmos_core.errors import EngineError
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import (
    CachePolicy,
    EngineCapabilities,
    EngineContext,
    Kind,
    Model,
    ModelContext,
    PlannedRun,
    Provider,
    RolloutEngine,
)
from cosmos_core.protocols.quantization import FORMATS
from cosmos_core.run.planning.checks import supported
from cosmos_core.testing.conformance.engine import flight, generation, updates
from cosmos_core.testing.conformance.engine.subject import (
    TINY,
    EngineDriver,
    Pricer,
    Readings,
    Start,
    Subject,
    flat,
    refuses,
    stopping_at,
)
from cosmos_core.testing.conformance.plugin import PluginConformance, fault
from cosmos_core.types import JSON, Payload, Prompt
from cosmos_core.weights.shards import dtype_name

_TOKENIZER: Final[Mapping[str, JSON]] = {"build": "byte-bpe", "vocab_size": 270, "split_digits": True}
_TEXTS: Final = ("Two and two", "Once upon a time there was", "x", "What is 6 times 7?", "A name")
_LOADS: Final[Mapping[CachePolicy, Mapping[int, int]]] = {"keep": {3: 0, 4: 4}, "recompute": {3: 3, 4: 4}}
"""The weights of each version that is loaded in flight: over a kept cache, the same ones as before change nothing."""


class EngineConformance(Readings, PluginConformance):
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
    tensor_parallel: ClassVar[int] = 1
    impossible: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "longer than the context": {"max_units": 1_000_000},
        "of no units": {"max_units": 0},
        "at a negative temperature": {"temperature": -1.0},
        "for two greedy samples": {"temperature": 0.0, "num_samples": 2},
    }

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
    def planned(self, context: EngineContext, subject: Subject) -> PlannedRun:
        """A run such as these tests generate for."""
        has_gpu = context.device.type == "cuda"
        return PlannedRun(
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

    @pytest.fixture
    def updates_in_flight(self, capabilities: EngineCapabilities) -> None:
        """Skip engines that take no weights while requests are in flight."""
        if not capabilities.in_flight_update:
            pytest.skip("not declared: in_flight_update")

    # -- what it declares ---------------------------------------------------------------------------------------------

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

    def test_its_preflight_says_nothing_against_what_it_does_here(
        self, provider: Provider[RolloutEngine], options: dict[str, JSON], planned: PlannedRun
    ) -> None:
        """An engine that generates in these tests has no run to refuse, at whatever temperature it is drawn."""
        if provider.preflight is None:
            pytest.skip("not declared: it has no preflight (`Provider.preflight`)")
        given: Any = structure(options, provider.options, "engine.options")
        drawn = [each for each in (0.7, 1.0) if self.draws_at(each)]
        for temperatures in ({"rollout.sampling.temperature": 1.0}, {"one": 0.0, "other": drawn[0]}):
            generation.expect_preflight(provider.preflight, given, attrs.evolve(planned, temperatures=temperatures))

    # -- what it generates --------------------------------------------------------------------------------------------

    def test_logprobs_are_those_of_the_trainer(self, subject: Subject) -> None:
        """Importance ratios compare the two; the trainer reads them and other arrays by name, dtype and shape."""
        # More samples than slots, of different lengths: batches mix prompts and single units, and close up.
        ragged = [
            subject.request(n, n, seed=n, max_units=3 + 4 * n, num_samples=2) for n in range(len(subject.prompts))
        ]
        results = subject.start().generate(ragged)
        for request, generated in zip(ragged, (each[0] for each in results), strict=True):
            generation.expect_prompt_kept(generated, request.prompt)
            if subject.has_tokens:
                generation.expect_tokens(generated)
        subject.expect_logprobs(flat(results))

    def test_a_unit_is_drawn_from_its_seed_its_sample_and_its_place(self, subject: Subject) -> None:
        """A group of equal samples teaches nothing, and a run is repeated only if draws depend on nothing else."""
        generation.expect_own_draws(subject)

    def test_draws_follow_the_distribution(self, subject: Subject) -> None:
        """Right log-probs of units that were drawn from something else bias every gradient."""
        _needs_tokens(subject)
        generation.expect_distribution(subject)

    def test_each_request_of_a_batch_has_its_own_temperature(self, subject: Subject) -> None:
        """Evaluations are generated among the samples that are trained on, many of them greedily."""
        generation.expect_own_temperatures(subject)

    def test_a_cut_distribution_is_honoured_or_refused(self, subject: Subject) -> None:
        """A request of the recipe is done or refused, never ignored."""
        _needs_tokens(subject)
        engine = subject.start()
        for cut in ({"top_k": 2}, {"top_p": 0.4}):
            generation.expect_cut(subject, engine, cut)

    def test_a_completion_ends_at_a_stop_id_or_its_longest_length(self, subject: Subject, model: Model) -> None:
        """Units after a stop token are no part of the answer; a truncated completion is told from a finished one."""
        lengths = (1, 7)
        results = subject.start().generate([subject.request(each, 0, max_units=each) for each in lengths])
        for length, each in zip(lengths, results, strict=True):
            subject.expect_whole(each, f"has no stop ids and max_units = {length}", length)
        if subject.has_tokens:
            generation.expect_stops(subject, model)

    def test_an_impossible_request_is_refused_with_its_whole_call(self, subject: Subject) -> None:
        """Requests of one call enter together or not at all: the replica leases them together."""
        engine = subject.start()
        for what, sampling in self.impossible.items():
            generation.expect_refused_whole(subject, engine, subject.request(what, 1, **sampling))
        foreign = attrs.evolve(subject.prompts[0], kind="something-else")
        generation.expect_refused_whole(subject, engine, subject.request("of kind 'something-else'", foreign))

    def test_lower_priority_numbers_go_first(self, subject: Subject) -> None:
        """Evaluations overtake what waits: new weights wait for them."""
        generation.expect_priorities(subject)

    def test_scores_are_those_of_the_trainer(self, subject: Subject) -> None:
        """`score` prices completions under what is loaded, after the temperature."""
        engine = subject.start()
        drawn = engine.generate([subject.request(n, n, max_units=4 + n) for n in range(len(subject.prompts))])
        payloads = [each.payload for each in flat(drawn)]
        for temperature in (1.0, 0.6):
            if self.draws_at(temperature):
                subject.expect_scores(engine, payloads, temperature=temperature)
            else:
                score = functools.partial(engine.score, payloads, temperature=temperature)
                refuses(EngineError, score, f"scores at {temperature}")
        engine.load(1, subject.pricer.tensors(1))
        subject.expect_scores(engine, payloads, temperature=self.temperature, weights=1)

    def test_every_unit_that_was_computed_has_its_record(self, subject: Subject, context: EngineContext) -> None:
        """Records are kept with their units when slots move, samples share prompts and the cache is computed anew."""
        _needs_tokens(subject)
        if not subject.capabilities.records:
            pytest.skip("not declared: records")
        generation.expect_records(subject, context.model)

    # -- requests in flight -------------------------------------------------------------------------------------------

    def test_pause_keep_holds_what_is_in_flight(self, subject: Subject) -> None:
        """New weights come in during such a pause: nothing is lost, repeated or generated; pausing twice is once."""
        flight.expect_pause_keep(subject)

    def test_pause_abort_ends_what_is_in_flight_with_partial_results(self, subject: Subject) -> None:
        """A partial result is still worth its log-probs."""
        flight.expect_pause_abort(subject)

    def test_pause_wait_finishes_what_is_in_flight(self, subject: Subject) -> None:
        """A request that comes while it waits is held: under steady traffic it would never return."""
        flight.expect_pause_wait(subject)

    def test_abort_ends_what_it_names_and_leaves_the_rest(self, subject: Subject) -> None:
        """A prompt that is no longer wanted must not cost the others anything, nor get a slot that it waits for."""
        flight.expect_abort(subject)

    def test_shutdown_ends_what_is_in_flight_as_aborted(self, subject: Subject) -> None:
        """Whoever waits for a request must hear of the end, in a pause as well."""
        for is_paused in (False, True):
            flight.expect_shutdown(subject, is_paused=is_paused)

    def test_shutdown_leaves_nothing_behind(self, subject: Subject) -> None:
        """A replica that ends must free its device and let its process end."""
        flight.expect_nothing_left(subject)

    def test_weights_that_overflow_are_told_never_sampled(self, subject: Subject) -> None:
        """A log-prob that is not finite poisons the training; the replica learns of it from `health`."""
        engine = subject.start()
        engine.health()
        engine.load(1, {name: torch.full_like(each, torch.nan) for name, each in subject.pricer.tensors(0).items()})

        def generate() -> object:
            return [self.logprobs(each).tolist() for (each,) in engine.generate([subject.request("x", 0)])]

        refuses(EngineError, generate, "generating with weights that are not finite")
        refuses(EngineError, engine.health, "health() after a request failed")

    def test_callbacks_are_called_once_and_may_use_the_engine(self, subject: Subject) -> None:
        """A completion is scored once; what is asked for on the engine's own thread must not wait for that thread."""
        flight.expect_callbacks(subject)

    def test_counters_tell_what_happened(self, subject: Subject) -> None:
        """Throughput and idle time are reported from them; declared sharing saves all prompts of a group but one."""
        flight.expect_counters(subject)
        if subject.has_tokens and subject.capabilities.prefix_sharing:
            flight.expect_shared_prefix(subject)

    # -- new weights --------------------------------------------------------------------------------------------------

    def test_the_layout_covers_each_tensor_once(self, subject: Subject, capabilities: EngineCapabilities) -> None:
        """The replica fetches what it names, in the recipe's precision; no rank may need memory for all of it."""
        if self.tensor_parallel > 1 and "tp" not in capabilities.mesh_axes:
            fault(f"tensor_parallel is {self.tensor_parallel}, and mesh_axes does not declare tp: declare it")
        for dtype in (torch.float32, torch.bfloat16):
            engine = subject.start(dtype=dtype)
            updates.expect_layout(subject, engine, dtype, self.tensor_parallel)
            updates.expect_loaded_as(subject, engine, dtype)

    def test_an_update_is_loaded_and_attested(self, subject: Subject) -> None:
        """Nothing is served on a version whose digest is not the published one; an older one may come again."""
        updates.expect_loaded(subject)

    def test_an_incomplete_update_is_refused_and_nothing_changes(self, subject: Subject) -> None:
        """Half-loaded weights would generate something that no trainer can price."""
        updates.expect_whole_updates(subject)

    @pytest.mark.usefixtures("updates_in_flight")
    def test_an_update_in_flight_loses_and_restarts_nothing(self, subject: Subject) -> None:
        """Generation goes on over updates; each unit tells which weights made it."""
        for cache, loads in _LOADS.items():
            # More samples than slots: some start after the updates, with nothing of the old weights.
            long = subject.long(3, num_samples=2)
            updates.expect_update_in_flight(subject, long, cache=cache, loads=loads, units=40)

    @pytest.mark.usefixtures("updates_in_flight")
    def test_an_update_under_64_sequences_in_flight(self, subject: Subject) -> None:
        """None is lost, none restarted, and each unit has the version and the log-prob of the weights that made it."""
        units = 64 * self.long_units // 3
        for cache in _LOADS:
            updates.expect_update_in_flight(
                subject, subject.long(64), cache=cache, loads={5: 1}, units=units, max_in_flight=64
            )

    @pytest.mark.usefixtures("updates_in_flight")
    def test_a_sample_that_starts_after_an_update_uses_nothing_older(self, subject: Subject) -> None:
        """Whatever is shared with the samples that started before: they go on with the old prompt, it must not."""
        updates.expect_fresh_samples(subject)

    def test_quantised_weights_are_loaded_attested_and_computed_with(self, subject: Subject, model: Model) -> None:
        """The trainer can only correct for what it knows; a matrix in full would be sent in vain, and not attested."""
        declared = [FORMATS[name] for name in FORMATS if name in subject.capabilities.quantizations]
        if not declared:
            pytest.skip("not declared: quantizations")
        for form in declared:
            updates.expect_quantised(subject, model, form)


def _needs_tokens(subject: Subject) -> None:
    if not subject.has_tokens:
        pytest.skip("not declared: payload kind tokens")
