"""The kit for engines: what a test class sets and overrides, and tests of what an engine generates.

Shape legend: V tokens of the vocabulary, U units of a prompt and completion, D width of a hidden state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
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
    FinishReason,
    Generated,
    Kind,
    Model,
    ModelContext,
    PlannedRun,
    Preflight,
    Provider,
    RolloutEngine,
)
from cosmos_core.protocols.model import Record
from cosmos_core.run.planning.checks import supported
from cosmos_core.testing.conformance.engine.flight import FlightTests
from cosmos_core.testing.conformance.engine.subject import (
    TINY,
    EngineDriver,
    Pricer,
    Start,
    Subject,
    expect_array,
    flat,
    refuses,
    stopping_at,
    tokens_of,
    twin,
)
from cosmos_core.testing.conformance.model.subject import tensor_of
from cosmos_core.testing.conformance.plugin import PluginConformance, fault, needs
from cosmos_core.types import JSON, Payload, Prompt
from cosmos_core.weights.shards import dtype_name

_TOKENIZER: Final[Mapping[str, JSON]] = {"build": "byte-bpe", "vocab_size": 270, "split_digits": True}
_TEXTS: Final = ("Two and two", "Once upon a time there was", "x", "What is 6 times 7?", "A name")
_DRAWS: Final = 512
_RECORD: Final = Record(name="hidden", dtype="float32", shape=(3,), option="the engine kit")
_ARRAYS: Final = {"completion": "int32", "logprobs": "float32", "versions": "int32"}


class EngineConformance(FlightTests, PluginConformance):
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

    def test_logprobs_are_those_of_the_trainer(self, subject: Subject) -> None:
        """Importance ratios compare the two; the trainer reads them and other arrays by name, dtype and shape."""
        # More samples than slots, of different lengths: batches mix prompts and single units, and close up.
        requests = subject.ragged(1, num_samples=2)
        results = subject.start().generate(requests)
        for request, (generated, other) in zip(requests, results, strict=True):
            units = request.sampling.max_units
            subject.expect_whole([generated, other], f"has no stop ids and max_units = {units}", units)
            for name, given in request.prompt.arrays.items():
                held = generated.payload.arrays.get(name)
                if held is None or bytes(held.data) != bytes(given.data):
                    fault(
                        f"the payload's {name!r} is not the request's; hand back all arrays of the prompt as they came"
                    )
            for name, dtype in _ARRAYS.items():
                if name != "completion" or subject.has_tokens:
                    expect_array(generated, name, dtype, (generated.num_units,))
        subject.expect_logprobs(flat(results))

    def test_a_unit_is_drawn_from_its_seed_its_sample_and_its_place(self, subject: Subject) -> None:
        """A group of equal samples teaches nothing, and a run is repeated only if draws depend on nothing else."""
        engine = subject.start()
        watched = subject.request("watched", 1, seed=7, num_samples=6, max_units=16)
        (group,) = engine.generate([watched])
        if len(group) != 6:
            fault(f"a request for 6 samples gave {len(group)}")
        different = len(set(map(self.content, group)))
        if different < 4:
            fault(f"6 samples of 16 units hold only {different} different completions; draw each from its own stream")
        if not subject.capabilities.seeded:
            return
        others = [subject.request(index, index, seed=index, num_samples=2, max_units=5 + index) for index in range(5)]
        among = engine.generate([*others[:2], watched, *others[2:]])[2]
        if not all(map(self.same, group, among)):
            fault(
                "a request drew other units among others than alone; draw sample i, unit j from (seed, i, j) only, or "
                "declare seeded=False"
            )
        ((single,),) = engine.generate([subject.request("single", 1, seed=7, max_units=16)])
        if not self.same(group[0], single):
            places = [place for place, each in enumerate(group) if self.same(each, single)]
            fault(
                "sample 0 of a group is not what a single sample of the same seed is"
                f"{f': that one is at place {places[0]}' if places else ''}; give the samples in their order, and draw "
                "sample i, unit j from (seed, i, j) only"
            )
        seeds = engine.generate([subject.request(seed, 1, seed=seed, max_units=16) for seed in range(4)])
        if len(set(map(self.content, flat(seeds)))) < 3:
            fault("four seeds drew the same units; Request.seed must choose the draws")

    def test_draws_follow_the_distribution(self, subject: Subject) -> None:
        """Right log-probs of units that were drawn from something else bias every gradient."""
        needs(subject.has_tokens, "payload kind tokens")
        (results,) = subject.start().generate([subject.request("many", 0, num_samples=_DRAWS, max_units=1)])
        next_V = subject.pricer.next_logprobs(subject.prompts[0], [], temperature=self.temperature)
        mean = next_V[[tokens_of(generated)[0] for generated in results]].mean()
        probs_V = next_V.exp()
        expected = (probs_V * next_V).sum()
        error = ((probs_V * (next_V - expected).square()).sum() / _DRAWS).sqrt()
        if abs(mean - expected) > 5.0 * error + self.tolerance:
            fault(
                f"the log-probs of {_DRAWS} units that were drawn after one prompt at temperature {self.temperature} "
                f"have the mean {mean:.3f}; of draws from that distribution it is {expected:.3f} +- {error:.3f}; draw "
                "from the distribution whose log-probs are reported, after the temperature"
            )

    def test_each_request_of_a_batch_has_its_own_temperature(self, subject: Subject) -> None:
        """Evaluations are generated among the samples that are trained on, many of them greedily."""
        temperatures = [each for each in (0.7, 1.3, 1.0) if self.draws_at(each)][:2]
        drawn = [subject.request(each, index, temperature=each) for index, each in enumerate(temperatures)]
        greedy = [subject.request(f"greedy {index}", index, temperature=0.0, max_units=4) for index in (0, 2)]
        results = subject.start().generate([*drawn, *greedy])
        for request, samples in zip(drawn, results, strict=False):
            subject.expect_logprobs(samples, temperature=request.sampling.temperature)
        if not subject.has_tokens:
            return
        for request, (generated,) in zip(greedy, results[len(drawn) :], strict=True):
            for unit, token, next_V in subject.alternatives(request, generated, 1.0):
                if next_V[token] < next_V.max() - self.tolerance:
                    likelier = f"{int(next_V.argmax())} is likelier; take the argmax"
                    fault(f"at temperature 0, unit {unit} is token {token}, but {likelier}")

    def test_a_cut_distribution_is_honoured_or_refused(self, subject: Subject) -> None:
        """A request of the recipe is done or refused, never ignored."""
        needs(subject.has_tokens, "payload kind tokens")
        engine = subject.start()
        cuts: tuple[dict[str, Any], ...] = ({"top_k": 2}, {"top_p": 0.4})
        for cut in cuts:
            request = subject.request(cut, 1, num_samples=2, max_units=4, **cut)
            try:
                (handle,) = engine.submit([request])
            except EngineError:
                continue
            for generated in engine.results(handle):
                for unit, token, next_V in subject.alternatives(request, generated, self.temperature):
                    likeliest_V = next_V.argsort(descending=True)
                    mass_V = next_V[likeliest_V].exp().cumsum(0)
                    kept = likeliest_V[: cut.get("top_k") or 1 + int((mass_V < cut["top_p"]).sum())]
                    if token not in kept:
                        shown = f"{cut} keeps tokens {sorted(kept.tolist())} of unit {unit}"
                        fault(f"{shown}, but {token} was drawn; refuse or do it")
                    expected, found = next_V[token] - next_V[kept].logsumexp(0), self.logprobs(generated)[unit]
                    is_processed = subject.capabilities.logprob_semantics == "processed"
                    if is_processed and abs(found - expected) > self.tolerance:
                        fault(
                            f"with {cut}, unit {unit} has the log-prob {found:.4f}; of the distribution "
                            f"drawn from it is {expected:.4f}; renormalise, or declare logprob_semantics='raw'"
                        )

    def test_a_completion_ends_at_a_stop_id_or_its_longest_length(self, subject: Subject, model: Model) -> None:
        """Units after a stop token are no part of the answer; a truncated completion is told from a finished one."""
        needs(subject.has_tokens, "payload kind tokens")
        stops = set(range(0, model.facts().vocab_size, 3))
        engine = subject.start(model=stopping_at(model, stops))
        for generated in flat(engine.generate([subject.request("stops", 0, num_samples=8, max_units=12)])):
            tokens = tokens_of(generated)
            ends = [unit for unit, token in enumerate(tokens, 1) if token in stops]
            wanted = (ends[0], FinishReason.STOP) if ends else (12, FinishReason.LENGTH)
            if (len(tokens), generated.reason) != wanted:
                what = f"unit {ends[0] - 1} of {len(tokens)} is a stop id" if ends else "no unit is a stop id"
                fault(
                    f"{what}, but the completion ends with {generated.reason} after {len(tokens)}; end it at the first "
                    "of Model.facts().stop_ids, that included, with STOP, or at max_units with LENGTH"
                )

    def test_an_impossible_request_is_refused_with_its_whole_call(self, subject: Subject) -> None:
        """Requests of one call enter together or not at all: the replica leases them together."""
        engine = subject.start()
        foreign = attrs.evolve(subject.prompts[0], kind="something-else")
        for bad in (
            *(subject.request(what, 1, **sampling) for what, sampling in self.impossible.items()),
            subject.request("of kind 'something-else'", foreign),
        ):
            good = subject.request(f"beside one {bad.request_id}", 0, max_units=2)
            refuses(EngineError, f"a request {bad.request_id}", engine.submit, [good, bad])
            entered = "of a call with one impossible request, the other one entered"
            stats = engine.stats()
            if stats.num_running + stats.num_waiting:
                fault(f"{entered}; check all before any enters")
            try:
                engine.generate([good])
            except EngineError as error:
                fault(f"{entered}: submitted again, it ends with: {error}")

    def test_lower_priority_numbers_go_first(self, subject: Subject) -> None:
        """Evaluations overtake what waits: new weights wait for them."""
        engine, order = subject.start(max_in_flight=1), list[str]()
        engine.pause("keep")
        handles = engine.submit([subject.request(each, 0, priority=each, max_units=2) for each in (5, -1, 0)])
        for handle in handles:
            handle.add_done_callback(lambda done: order.append(done.request.request_id))
        engine.resume()
        flat(map(engine.results, handles))
        if order != ["-1", "0", "5"]:
            told = ", ".join(order)
            fault(f"requests of priority 5, -1 and 0 with one slot ended in the order {told}; lower is first")

    def test_scores_are_those_of_the_trainer(self, subject: Subject) -> None:
        """`score` prices completions under what is loaded, after the temperature."""
        engine = subject.start()
        payloads = [each.payload for each in flat(engine.generate(subject.ragged(4)))]
        for temperature in (1.0, 0.6):
            if self.draws_at(temperature):
                subject.expect_scores(engine, payloads, temperature)
            else:
                refuses(EngineError, f"scores at {temperature}", engine.score, payloads, temperature=temperature)
        engine.load(1, subject.pricer.tensors(1))
        subject.expect_scores(engine, payloads, self.temperature, weights=1)

    def test_every_unit_that_was_computed_has_its_record(self, subject: Subject, context: EngineContext) -> None:
        """Records are kept with their units when slots move, samples share prompts and the cache is computed anew."""
        needs(subject.has_tokens, "payload kind tokens")
        needs(subject.capabilities.records, "records")
        methods: dict[str, Callable[..., Any]] = {
            "records": lambda _: (_RECORD,),
            "record": lambda _, module: _record(module),
            "counters": lambda *_: (),
            "after_step": lambda *_: {},
        }
        engine = subject.start(model=twin(context.model, **methods), dialogues=True)
        opened = flat(engine.generate(subject.ragged(1, num_samples=3)))
        turns = subject.next_turns(opened) if len(subject.texts) == len(subject.prompts) else []
        for generated in (*opened, *flat(engine.generate(turns))):
            _expect_record(subject, generated)
        handles = engine.submit(subject.long(6))
        engine.wait_for_units(engine.stats().generated_units + 10)
        engine.pause("abort")
        for generated in flat(map(engine.results, handles)):
            _expect_record(subject, generated)
        if not subject.capabilities.in_flight_update:
            return
        # What ends before it is computed anew keeps its records; over a kept cache, only units before the update had
        # their forward with the old weights; what is computed anew is recorded anew.
        updates: tuple[tuple[int, CachePolicy, bool], ...] = (
            (1, "recompute", True),
            (2, "keep", False),
            (3, "recompute", False),
        )
        for version, cache, is_aborted in updates:
            engine.resume()
            before = engine.stats().generated_units
            handles = engine.submit(subject.long(3))
            engine.pause_in_flight(handles, before + 20)
            engine.load(version, subject.pricer.tensors(version), cache)
            if is_aborted:
                engine.abort([handle.request.request_id for handle in handles])
            else:
                engine.resume()
            weights = version if cache == "recompute" and not is_aborted else version - 1
            for generated in flat(map(engine.results, handles)):
                old = len(tensor_of(generated.payload, "prompt")) + self.versions(generated).count(version - 1) - 1
                _expect_record(subject, generated, weights, last=old if cache == "keep" else None)


def _record(module: Any) -> Callable[[], Mapping[str, torch.Tensor]]:
    """Every unit's last hidden state, in part: it shows whatever was wrong."""
    newest: dict[str, torch.Tensor] = {}

    def note(_: torch.nn.Module, __: tuple[Any, ...], output: Any) -> None:
        hidden_UD = (output[0] if isinstance(output, tuple) else output)[0]
        newest[_RECORD.name] = hidden_UD[:, : _RECORD.shape[0]].float()

    module.get_decoder().layers[-1].register_forward_hook(note)
    return lambda: newest


def _expect_record(subject: Subject, generated: Generated, weights: int = 0, *, last: int | None = None) -> None:
    """Check the records of a completion's first units (all by default) against those of the trainer's forward."""
    if not generated.num_units:
        return
    units = len(tensor_of(generated.payload, "prompt")) + generated.num_units - 1
    # All units but the last went through a forward.
    expect_array(generated, _RECORD.name, _RECORD.dtype, (units, *_RECORD.shape))
    expected = subject.pricer.recorded(generated.payload, _record, weights)[_RECORD.name]
    apart = (tensor_of(generated.payload, _RECORD.name) - expected)[:last].abs().amax(-1)
    scale = 1.0 + float(expected.abs().max())
    if apart.numel() and not apart.max() <= subject.read.tolerance * scale:
        fault(
            f"the record of unit {int(apart.argmax())} of {units} differs by {apart.max():.2g} from that of the "
            "forward which computed what is cached of it; keep records with their units when slots move, prompts "
            "are shared and the cache is computed anew"
        )
