"""Tests of what an engine generates: the trainer's log-probs, its own draws, proper ends, and refusals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import attrs
import pytest
import torch

from cosmos_core.config.structure import structure
from cosmos_core.errors import EngineError
from cosmos_core.protocols import (
    EngineCapabilities,
    EngineContext,
    FinishReason,
    Generated,
    Model,
    PlannedRun,
    Preflight,
    Provider,
    Request,
    RolloutEngine,
)
from cosmos_core.testing.conformance.engine.subject import (
    TEMPERATURE,
    EngineSetting,
    Pricer,
    Start,
    needs_tokens,
    refuses,
    stopping_at,
    tokens_of,
)
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import JSON, Payload
from cosmos_core.weights import slices
from cosmos_core.weights.shards import ShardMap, dtype_name

_IMPOSSIBLE: Final[Mapping[str, Mapping[str, Any]]] = {
    "longer than the context": {"max_units": 1_000_000},
    "of no units": {"max_units": 0},
    "at a negative temperature": {"temperature": -1.0},
    "for two greedy samples": {"temperature": 0.0, "num_samples": 2},
}

_DRAWS: Final = 512
_STANDARD_ERRORS: Final = 5.0


class GenerationTests(EngineSetting):
    """Tests of generated completions."""

    def test_logprobs_are_those_of_the_trainer(
        self, start: Start, pricer: Pricer, prompts: list[Payload], capabilities: EngineCapabilities
    ) -> None:
        """Importance ratios compare the two: what the engine reports, the trainer must find."""
        # More samples than slots, of different lengths: batches mix prompts and single units, and close up.
        requests = [
            self.request(index, prompt, seed=index, max_units=3 + 4 * index, num_samples=2)
            for index, prompt in enumerate(prompts)
        ]
        for results in start().generate(requests):
            for generated in results:
                self.check_logprobs(pricer, generated, capabilities)

    def test_a_payload_holds_what_its_kind_says(
        self, start: Start, prompts: list[Payload], capabilities: EngineCapabilities
    ) -> None:
        """The trainer reads arrays by name, dtype and shape."""
        needs_tokens(capabilities)
        ((generated,),) = start().generate([self.request("one", prompts[0], max_units=5)])
        arrays, number = generated.payload.arrays, generated.num_units
        for name, dtype in (("completion", "int32"), ("logprobs", "float32"), ("versions", "int32")):
            found = (arrays[name].dtype, arrays[name].shape) if name in arrays else None
            if found != (dtype, (number,)):
                fault(f"array {name!r} of a completion of {number} units is {found}; it must be {dtype} [{number}]")
        for name, given in prompts[0].arrays.items():
            if name not in arrays or bytes(arrays[name].data) != bytes(given.data):
                fault(f"the payload's {name!r} is not the request's; hand back all arrays of the prompt as they came")

    def test_samples_come_in_order_and_differ(self, start: Start, prompts: list[Payload]) -> None:
        """A group of equal samples teaches nothing."""
        (results,) = start().generate([self.request("group", prompts[0], num_samples=6)])
        if len(results) != 6:
            fault(f"a request for 6 samples gave {len(results)}")
        different = len({self.content(generated) for generated in results})
        if different < 4:
            fault(f"6 samples of 8 units hold only {different} different completions; draw each from its own stream")

    def test_a_request_draws_the_same_alone_and_among_others(
        self, start: Start, prompts: list[Payload], capabilities: EngineCapabilities
    ) -> None:
        """A run can be repeated only if draws do not depend on what happens to be in flight."""
        _needs_seeds(capabilities)
        engine = start()
        watched = self.request("watched", prompts[1], seed=7, num_samples=3, max_units=16)
        (alone,) = engine.generate([watched])
        others = [
            self.request(index, prompt, seed=index, num_samples=2, max_units=5 + index)
            for index, prompt in enumerate(prompts)
        ]
        among = engine.generate([*others[:2], watched, *others[2:]])[2]
        if not all(self.same(*pair) for pair in zip(alone, among, strict=True)):
            fault(
                "a request drew other units among others than alone; draw sample i, unit j from (seed, i, j) only, or "
                "declare seeded=False"
            )

    def test_another_seed_draws_otherwise(
        self, start: Start, prompts: list[Payload], capabilities: EngineCapabilities
    ) -> None:
        """Each prompt of a run has a seed of its own."""
        _needs_seeds(capabilities)
        requests = [self.request(seed, prompts[0], seed=seed, max_units=16) for seed in range(4)]
        results = start().generate(requests)
        if len({self.content(each) for (each,) in results}) < 3:
            fault("four seeds drew the same units; Request.seed must choose the draws")

    @pytest.mark.parametrize("cut", [{"top_k": 2}, {"top_p": 0.4}], ids=["top_k", "top_p"])
    def test_a_cut_distribution_is_honoured_or_refused(
        self,
        start: Start,
        pricer: Pricer,
        prompts: list[Payload],
        capabilities: EngineCapabilities,
        cut: Mapping[str, Any],
    ) -> None:
        """A request of the recipe is done or refused, never ignored."""
        needs_tokens(capabilities)
        engine = start()
        request = self.request("cut", prompts[1], num_samples=2, max_units=5, **cut)
        try:
            (handle,) = engine.submit([request])
        except EngineError:
            return
        for generated in engine.results(handle):
            tokens = tokens_of(generated)
            for unit, token in enumerate(tokens):
                next_V = pricer.next_logprobs(request.prompt, tokens[:unit], temperature=TEMPERATURE)
                kept = _kept(next_V.exp().tolist(), **cut)
                if token not in kept:
                    fault(f"{cut} keeps tokens {sorted(kept)} of unit {unit}, but {token} was drawn; refuse or do it")
                if capabilities.logprob_semantics == "processed":
                    expected = next_V[token] - next_V[sorted(kept)].logsumexp(0)
                    found = self.logprobs(generated)[unit]
                    if abs(found - expected) > self.tolerance:
                        fault(
                            f"with {cut}, unit {unit} has the log-prob {found:.4f}; of the distribution drawn from it "
                            f"is {expected:.4f}; renormalise, or declare logprob_semantics='raw'"
                        )

    def test_a_completion_ends_at_a_stop_id(
        self, start: Start, model: Model, prompts: list[Payload], capabilities: EngineCapabilities
    ) -> None:
        """Units after a stop token are no part of the answer; the stop token itself is."""
        needs_tokens(capabilities)
        stops = set(range(0, model.facts().vocab_size, 3))
        engine = start(model=stopping_at(model, stops))
        (results,) = engine.generate([self.request("stops", prompts[0], num_samples=8, max_units=12)])
        for generated in results:
            tokens = tokens_of(generated)
            ends = [unit for unit, token in enumerate(tokens) if token in stops]
            if ends and (ends[0] != len(tokens) - 1 or generated.reason is not FinishReason.STOP):
                fault(
                    f"unit {ends[0]} of {len(tokens)} is a stop id, but the completion ends with {generated.reason}; "
                    "end it there, the stop id included, with FinishReason.STOP"
                )
            if not ends and (generated.reason is not FinishReason.LENGTH or len(tokens) != 12):
                fault(
                    f"a completion without a stop id has {len(tokens)} of 12 units and ends with {generated.reason}; "
                    "use Model.facts().stop_ids only, and FinishReason.LENGTH at max_units"
                )

    def test_a_completion_ends_at_its_longest_length(self, start: Start, prompts: list[Payload]) -> None:
        """A truncated completion is told apart from a finished one."""
        lengths = (1, 7)
        completed = start().generate([self.request(length, prompts[0], max_units=length) for length in lengths])
        for length, (generated,) in zip(lengths, completed, strict=True):
            if generated.num_units != self.decisions(length) or generated.reason is not self.whole:
                fault(f"with no stop ids and max_units = {length}: {generated.num_units} units, {generated.reason}")

    @pytest.mark.parametrize("what", _IMPOSSIBLE)
    def test_an_impossible_request_is_refused_with_its_whole_call(
        self, start: Start, prompts: list[Payload], what: str
    ) -> None:
        """Requests of one call enter together or not at all: the replica leases them together."""
        engine = start()
        good = self.request("good", prompts[0], max_units=2)
        bad = self.request("bad", prompts[1], **_IMPOSSIBLE[what])
        refuses(EngineError, lambda: engine.submit([good, bad]), f"a request {what}")
        stats = engine.stats()
        if stats.num_running + stats.num_waiting:
            fault("of a call with one impossible request, the other one entered; check all before any enters")
        try:
            engine.generate([good])
        except EngineError as error:
            fault(
                f"of a call with one impossible request, the other one entered: submitted again, it ends with: {error}"
            )

    def test_an_undeclared_payload_kind_is_refused(self, start: Start, prompts: list[Payload]) -> None:
        """Undeclared kinds are refused."""
        foreign = attrs.evolve(prompts[0], kind="something-else")
        engine = start()
        refuses(EngineError, lambda: engine.submit([self.request("x", foreign)]), "a payload of kind 'something-else'")

    def test_lower_priority_numbers_go_first(self, start: Start, prompts: list[Payload]) -> None:
        """Evaluations overtake what waits: new weights wait for them."""
        engine = start(max_in_flight=1)
        order: list[str] = []
        engine.pause("keep")
        handles = engine.submit(
            [self.request(priority, prompts[0], priority=priority, max_units=2) for priority in (5, -1, 0)]
        )
        for handle in handles:
            handle.add_done_callback(lambda done: order.append(done.request.request_id))
        engine.resume()
        for handle in handles:
            engine.results(handle)
        if order != ["-1", "0", "5"]:
            fault(
                f"requests of priority 5, -1 and 0 with one slot ended in the order {', '.join(order)}; lower is first"
            )

    def test_a_shared_prefix_is_processed_once(
        self, start: Start, prompts: list[Payload], capabilities: EngineCapabilities
    ) -> None:
        """Declared prefix sharing saves the prompt of all samples but one."""
        needs_tokens(capabilities)
        if not capabilities.prefix_sharing:
            pytest.skip("not declared: prefix_sharing")
        engine = start()
        engine.generate([self.request("group", prompts[1], num_samples=4, max_units=3)])
        units, size = engine.stats().prompt_units, prompts[1].arrays["prompt"].shape[0]
        if units != size:
            fault(f"a group of 4 processed {units} prompt units of a prompt of {size}; do not declare prefix_sharing")

    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    def test_scores_are_those_of_the_trainer(
        self, start: Start, pricer: Pricer, prompts: list[Payload], temperature: float
    ) -> None:
        """`score` prices completions under the loaded weights, after the temperature."""
        engine = start()
        requests = [self.request(index, prompt, max_units=4 + index) for index, prompt in enumerate(prompts)]
        payloads = [each.payload for (each,) in engine.generate(requests)]
        if self.draws_at(temperature):
            self.check_scores(pricer, engine, payloads, temperature=temperature)
        else:
            refuses(EngineError, lambda: engine.score(payloads, temperature=temperature), f"scores at {temperature}")

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

    def test_as_many_processes_as_asked_for_hold_the_model(
        self, start: Start, capabilities: EngineCapabilities
    ) -> None:
        """A model that needs the memory of several would not fit one."""
        if self.tensor_parallel > 1 and "tp" not in capabilities.mesh_axes:
            fault(f"tensor_parallel is {self.tensor_parallel}, and mesh_axes does not declare tp: declare it")
        layout = start().layout()
        if sorted(layout) != list(range(self.tensor_parallel)):
            fault(f"the layout names ranks {sorted(layout)}; tensor_parallel asks for {self.tensor_parallel}")
        sizes = {rank: sum(slices.size(piece) for piece, _ in held) for rank, held in layout.items()}
        tensors = ShardMap.of_layout(layout).tensors
        whole = sum(math.prod(facts.shape) for facts in tensors.values())
        if self.tensor_parallel > 1 and max(sizes.values()) >= whole:
            fault(f"ranks hold {sizes} elements of a model of {whole}; split it, so that none holds all of it")

    # -- how units are drawn, and what planning is told ---------------------------------------------------------------

    def test_draws_follow_the_distribution(
        self, start: Start, pricer: Pricer, prompts: list[Payload], capabilities: EngineCapabilities
    ) -> None:
        """Right log-probs of units that were drawn from something else bias every gradient."""
        needs_tokens(capabilities)
        (results,) = start().generate([self.request("many", prompts[0], num_samples=_DRAWS, max_units=1)])
        next_V = pricer.next_logprobs(prompts[0], [], temperature=TEMPERATURE)
        mean = next_V[[tokens_of(generated)[0] for generated in results]].mean()
        probs_V = next_V.exp()
        expected = (probs_V * next_V).sum()
        error = ((probs_V * (next_V - expected).square()).sum() / _DRAWS).sqrt()
        if abs(mean - expected) > _STANDARD_ERRORS * error + self.tolerance:
            fault(
                f"the log-probs of {_DRAWS} units that were drawn after one prompt at temperature {TEMPERATURE} have "
                f"the mean {mean:.3f}; of draws from that distribution it is {expected:.3f} +- {error:.3f}; draw from "
                "the distribution whose log-probs are reported, after the temperature"
            )

    def test_each_request_of_a_batch_has_its_own_temperature(
        self, start: Start, pricer: Pricer, prompts: list[Payload], capabilities: EngineCapabilities
    ) -> None:
        """Evaluations are generated among the samples that are trained on."""
        temperatures = [each for each in (0.7, 1.3, 1.0) if self.draws_at(each)][:2]
        drawn = [self.request(each, prompts[index], temperature=each) for index, each in enumerate(temperatures)]
        greedy = self.request("greedy", prompts[2], temperature=0.0, max_units=4)
        *results, (likeliest,) = start().generate([*drawn, greedy])
        for request, (generated,) in zip(drawn, results, strict=True):
            self.check_logprobs(pricer, generated, capabilities, temperature=request.sampling.temperature)
        if "tokens" in capabilities.payload_kinds:
            self._check_greedy(pricer, greedy, likeliest)

    def test_greedy_takes_the_likeliest_unit(
        self, start: Start, pricer: Pricer, prompts: list[Payload], capabilities: EngineCapabilities
    ) -> None:
        """Evaluations are greedy: their numbers must be the model's own."""
        needs_tokens(capabilities)
        requests = [self.request(index, prompts[index], temperature=0.0, max_units=4) for index in range(2)]
        for (generated,), request in zip(start().generate(requests), requests, strict=True):
            self._check_greedy(pricer, request, generated)

    def test_a_single_sample_is_the_first_of_a_group(
        self, start: Start, prompts: list[Payload], capabilities: EngineCapabilities
    ) -> None:
        """Sample *i* of a result is the one drawn as sample *i*, in whatever order they end."""
        if not capabilities.seeded:
            pytest.skip("not declared: seeded")
        engine = start()
        (group,) = engine.generate([self.request("group", prompts[0], seed=3, num_samples=6, max_units=16)])
        ((single,),) = engine.generate([self.request("single", prompts[0], seed=3, max_units=16)])
        if not self.same(group[0], single):
            places = [place for place, each in enumerate(group) if self.same(each, single)]
            fault(
                "sample 0 of a group is not what a single sample of the same seed is"
                f"{f': that one is at place {places[0]}' if places else ''}; give the samples in their order, and draw "
                "sample i, unit j from (seed, i, j) only"
            )

    def _check_greedy(self, pricer: Pricer, request: Request, generated: Generated) -> None:
        tokens = tokens_of(generated)
        for unit, token in enumerate(tokens):
            next_V: torch.Tensor = pricer.next_logprobs(request.prompt, tokens[:unit], temperature=1.0)
            if next_V[token] < next_V.max() - self.tolerance:
                fault(
                    f"at temperature 0, unit {unit} is token {token}, but {int(next_V.argmax())} is likelier; take "
                    "the argmax"
                )

    @pytest.fixture
    def planned(self, context: EngineContext, prompts: list[Payload]) -> PlannedRun:
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
            samplings={"rollout.sampling": self.request("one", prompts[0]).sampling},
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
            asked = attrs.evolve(planned, temperatures=temperatures)
            told, again = (provider.preflight(given, asked) for _ in range(2))
            if not isinstance(told, Preflight):
                fault(f"preflight() returned {told!r}; return a Preflight")
            if told != again:
                fault(f"preflight() said {told}, and of the same run {again}; it must depend on what it is given alone")
            if said := [*told.problems, *([told.absent] if told.absent else [])]:
                fault(f"preflight() refuses a run such as these tests generate for: {said[0]}")


def _needs_seeds(capabilities: EngineCapabilities) -> None:
    if not capabilities.seeded:
        pytest.skip("not declared: seeded")


def _kept(probs: list[float], *, top_k: int = 0, top_p: float = 1.0) -> set[int]:
    """Tokens that a cut leaves: the k likeliest, or the fewest whose mass reaches p."""
    kept: set[int] = set()
    mass = 0.0
    for token in sorted(range(len(probs)), key=lambda token: -probs[token]):
        if (top_k and len(kept) == top_k) or mass >= top_p:
            break
        kept.add(token)
        mass += probs[token]
    return kept
