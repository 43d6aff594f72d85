"""Faults in engines that the kit must name: each is the embedded engine with one thing done wrong."""

from __future__ import annotations

import textwrap

import attrs
import pytest

from cosmos_core.testing import EngineConformance
from tests.nightly.kit.outcomes import only, unnamed

MODULE = """
import attrs
import threading
import torch
from cosmos_core.protocols import EngineCapabilities, Preflight, Provider, hookimpl
from cosmos_core.rollout.embedded import sampler
from cosmos_core.rollout.embedded.engine import EmbeddedEngine
from cosmos_core.rollout.embedded.options import EmbeddedOptions

def drawn(requests, **changes):
    return [attrs.evolve(each, sampling=attrs.evolve(each.sampling, **changes)) for each in requests]

class Wrapped:
    def __init__(self, handle, result):
        self.request, self.add_done_callback = handle.request, handle.add_done_callback
        self.result = lambda timeout_s=None: result(handle, timeout_s)

class Engine(EmbeddedEngine):
{body}

@hookimpl
def cosmos_engine():
    return Provider(create=Engine, options=EmbeddedOptions, capabilities=EngineCapabilities({capabilities}){more})
"""


@attrs.frozen
class Fault:
    """A body for the engine, the test that must catch it, and what that test must say."""

    test: str
    message: str
    body: str = "pass"
    capabilities: str = ""
    settings: str = ""
    more: str = ""


PLANTED = {
    "wrong-semantics": Fault(
        "test_logprobs_are_those_of_the_trainer",
        "they are processed ones: declare logprob_semantics='processed'",
        capabilities="logprob_semantics='raw'",
    ),
    "version-off-by-one": Fault(
        "test_an_update_in_flight_loses_and_restarts_nothing",
        "units were generated before the first update, but",
        """
        def _apply(self, update, cache):
            for sample in self._scheduler._running:
                if sample.num_generated:
                    sample.spans.append((sample.num_generated - 1, update.version))
            return super()._apply(update, cache)
        """,
    ),
    "starts-again-after-an-update": Fault(
        "test_an_update_in_flight_loses_and_restarts_nothing",
        "an update made some of them again",
        """
        def _apply(self, update, cache):
            for sample in self._scheduler._running:
                del sample.tokens[sample.parent.num_prompt :], sample.logprobs[:], sample.spans[:]
            return super()._apply(update, "recompute")
        """,
    ),
    "insists-on-newer-versions": Fault(
        "test_an_update_is_loaded_and_attested",
        "version 5 is older than 6",
        """
        def begin_update(self, version):
            if version < self._queue.version:
                raise ValueError(f"version {version} is older than {self._queue.version}")
            super().begin_update(version)
        """,
    ),
    "keeps-the-cache-always": Fault(
        "test_an_update_in_flight_loses_and_restarts_nothing",
        "log-probs are not the trainer's",
        """
        def _apply(self, update, cache):
            return super()._apply(update, "keep")
        """,
    ),
    "forgets-to-recompute-some-of-many": Fault(
        "test_an_update_in_flight_loses_and_restarts_nothing",
        "log-probs are not the trainer's: unit",
        """
        def _apply(self, update, cache):
            scheduler = self._scheduler
            def all_back():
                return type(scheduler).requeue(scheduler)
            def some_back():
                kept = scheduler._running[:8]
                if len(scheduler._running) < 32:
                    return all_back()
                for sample in scheduler._running[8:]:
                    sample.slot, sample.cached = -1, 0
                scheduler.add(scheduler._running[8:])
                scheduler._running, scheduler._features = kept, None
            scheduler.requeue = some_back if update.version == 3 else all_back
            return super()._apply(update, cache)
        """,
    ),
    "makes-some-of-many-again": Fault(
        "test_an_update_in_flight_loses_and_restarts_nothing",
        "an update made some of them again",
        """
        def _apply(self, update, cache):
            again = self._scheduler._running[32:]
            for sample in again:
                del sample.tokens[sample.parent.num_prompt :], sample.logprobs[:], sample.spans[:]
            return super()._apply(update, "recompute" if again else cache)
        """,
    ),
    "shares-an-old-prompt": Fault(
        "test_an_update_in_flight_loses_and_restarts_nothing",
        "log-probs are not the trainer's: unit",
        """
        def _apply(self, update, cache):
            digest = super()._apply(update, cache)
            for sample in self._scheduler._running:
                sample.prefix_load = self._scheduler._loads
            return digest
        """,
    ),
    "keeps-turns-over-a-recompute": Fault(
        "test_the_next_turn_of_a_dialogue_is_what_it_would_be_afresh",
        "log-probs are not the trainer's: unit",
        """
        def _apply(self, update, cache):
            self._prefixes.clear = lambda: None
            return super()._apply(update, cache)
        """,
    ),
    "draws-otherwise-over-a-kept-turn": Fault(
        "test_the_next_turn_of_a_dialogue_is_what_it_would_be_afresh",
        "draws depend on the seed, the sample and the unit, whatever is in a cache",
        """
        def _build(self):
            super()._build()
            find = self._prefixes.find
            def found(sequence):
                kept = find(sequence)
                if kept is not None:
                    request = sequence.parent.request
                    sequence.parent.request = attrs.evolve(request, seed=request.seed + 1)
                return kept
            self._prefixes.find = found
        """,
    ),
    "forgets-records-of-kept-turns": Fault(
        "test_every_unit_that_was_computed_has_its_record",
        "differs by",
        """
        def _build(self):
            super()._build()
            keep = self._prefixes.keep
            def kept(sequence):
                keep(sequence)
                for each in self._prefixes._kept:
                    for rows in each.records.values():
                        rows[:] = 0
            self._prefixes.keep = kept
        """,
        capabilities="records=True",
    ),
    "shares-prompts-over-updates": Fault(
        "test_an_update_is_loaded_and_attested",
        "log-probs are not the trainer's: unit",
        """
        seen, old = set(), set()

        def _apply(self, update, cache):
            self.old = self.seen
            return super()._apply(update, cache)

        def submit(self, requests):
            self.seen = self.seen | {self.key(each) for each in requests}
            return super().submit(requests)

        def key(self, request):
            return bytes(request.prompt.arrays["prompt"].data)

        def _take(self, plan, tokens, logprobs):
            stale = [self.key(sample.parent.request) in self.old for sample in plan.drawn]
            super()._take(plan, tokens, [each - 0.5 * old for each, old in zip(logprobs, stale)])
        """,
        "in_flight_update=False",
    ),
    "tells-nonsense-after-a-kept-update": Fault(
        "test_an_update_in_flight_loses_and_restarts_nothing",
        "of version 3, has -1.0000, the trainer says",
        """
        is_kept = False

        def _apply(self, update, cache):
            self.is_kept = cache == "keep"
            return super()._apply(update, cache)

        def _take(self, plan, tokens, logprobs):
            super()._take(plan, tokens, [-1.0] * len(logprobs) if self.is_kept else logprobs)
        """,
    ),
    "scores-with-the-first-weights": Fault(
        "test_scores_are_those_of_the_trainer",
        "price it under the loaded weights",
        """
        def start(self):
            super().start()
            self.first = {name: tensor.clone() for name, tensor in self._loaded.tensors.items()}

        @torch.inference_mode()
        def score(self, payloads, *, temperature):
            loaded = {name: tensor.clone() for name, tensor in self._loaded.tensors.items()}
            for name, tensor in self.first.items():
                self._loaded.tensors[name].copy_(tensor)
            scores = super().score(payloads, temperature=temperature)
            for name, tensor in loaded.items():
                self._loaded.tensors[name].copy_(tensor)
            return scores
        """,
    ),
    "takes-half-an-update": Fault(
        "test_an_incomplete_update_is_refused_and_nothing_changes",
        "an update that lacks one slice was accepted; raise WeightSyncError",
        """
        def commit_update(self, cache="keep"):
            if self._update is not None:
                self._update.check = lambda: None
            return super().commit_update(cache)
        """,
    ),
    "counts-elements-only": Fault(
        "test_an_incomplete_update_is_refused_and_nothing_changes",
        "an update with one slice twice and another missing was accepted",
        """
        def commit_update(self, cache="keep"):
            pieces = {} if self._update is None else self._update._pieces
            written = sum(data.numel() for chunks in pieces.values() for _, data in chunks)
            if written == sum(tensor.numel() for tensor in self._loaded.tensors.values()):
                self._update.check = lambda: None
            return super().commit_update(cache)
        """,
    ),
    "forgets-a-tensor": Fault(
        "test_the_layout_covers_each_tensor_once",
        "as None; it is published as TensorFacts(",
        """
        def layout(self):
            return {0: super().layout()[0][:-1]}
        """,
    ),
    "holds-matrices-whole": Fault(
        "test_quantised_weights_are_loaded_attested_and_computed_with",
        "it is published as TensorFacts(shape=(32, 48), dtype='float8_e4m3fn')",
        """
        def start(self):
            self._context = attrs.evolve(self._context, quantization="none")
            super().start()
        """,
        "quantizations=frozenset({'fp8'})",
    ),
    "computes-with-the-matrices-of-before": Fault(
        "test_quantised_weights_are_loaded_attested_and_computed_with",
        "log-probs are not the trainer's: unit",
        """
        def _apply(self, update, cache):
            self._loaded.dequantise = lambda: None
            self._loaded._matrices = {}
            return super()._apply(update, cache)
        """,
        "quantizations=frozenset({'nvfp4'})",
    ),
    "attests-nothing": Fault(
        "test_an_update_is_loaded_and_attested",
        "commit_update() gave the digest 'fine'",
        """
        def commit_update(self, cache="keep"):
            super().commit_update(cache)
            return "fine"
        """,
    ),
    "draws-by-the-batch": Fault(
        "test_a_unit_is_drawn_from_its_seed_its_sample_and_its_place",
        "drew other units among others than alone",
        """
        def submit(self, requests):
            return super().submit([attrs.evolve(each, seed=each.seed + len(requests)) for each in requests])
        """,
    ),
    "draws-uniformly": Fault(
        "test_draws_follow_the_distribution",
        "draw from the distribution whose log-probs are reported",
        """
        def _step(self):
            draw = sampler.draw

            def uniform(logits, row_sampling):
                tokens, _ = draw(torch.zeros_like(logits), row_sampling)
                logprobs = torch.log_softmax(logits / row_sampling.temperature_R[:, None], -1)
                return tokens, logprobs.gather(1, tokens[:, None])[:, 0]

            sampler.draw = uniform
            try:
                super()._step()
            finally:
                sampler.draw = draw
        """,
    ),
    "takes-the-first-temperature": Fault(
        "test_each_request_of_a_batch_has_its_own_temperature",
        "at temperature 1.3; check positions, caches, the temperature",
        """
        def submit(self, requests):
            first = requests[0].sampling.temperature
            return super().submit(drawn(requests, temperature=first))
        """,
    ),
    "gives-the-last-sample-first": Fault(
        "test_a_unit_is_drawn_from_its_seed_its_sample_and_its_place",
        "that one is at place 5; give the samples in their order",
        """
        def submit(self, requests):
            handles = super().submit(requests)
            return [Wrapped(handle, lambda each, timeout_s: each.result(timeout_s)[::-1]) for handle in handles]
        """,
    ),
    "copies-a-sample": Fault(
        "test_a_unit_is_drawn_from_its_seed_its_sample_and_its_place",
        "hold only 1 different completions",
        """
        def _finish(self, ended):
            for sample in ended:
                first = sample.parent.samples[0]
                sample.tokens, sample.logprobs = first.tokens, first.logprobs
            super()._finish(ended)
        """,
    ),
    "ignores-a-cut": Fault(
        "test_a_cut_distribution_is_honoured_or_refused",
        "was drawn; refuse or do it",
        """
        def submit(self, requests):
            return super().submit(drawn(requests, top_k=0, top_p=1.0))
        """,
    ),
    "never-greedy": Fault(
        "test_each_request_of_a_batch_has_its_own_temperature",
        "is likelier; take the argmax",
        """
        def submit(self, requests):
            return super().submit([drawn([each], temperature=each.sampling.temperature or 2.0)[0] for each in requests])
        """,
    ),
    "goes-on-after-a-stop": Fault(
        "test_a_completion_ends_at_a_stop_id_or_its_longest_length",
        "is a stop id, but the completion ends with",
        """
        def start(self):
            self._stop_ids = frozenset()
            super().start()
        """,
    ),
    "enters-one-by-one": Fault(
        "test_an_impossible_request_is_refused_with_its_whole_call",
        "the other one entered",
        """
        def submit(self, requests):
            self.pause()
            return [super(Engine, self).submit([each])[0] for each in requests]
        """,
    ),
    "scores-at-one": Fault(
        "test_scores_are_those_of_the_trainer",
        "score() of payload 0 at temperature 0.6",
        """
        def score(self, payloads, *, temperature):
            return super().score(payloads, temperature=1.0)
        """,
    ),
    "loses-requests-on-abort": Fault(
        "test_pause_abort_ends_what_is_in_flight_with_partial_results",
        "is not finished when the call that ends it has returned",
        """
        def _end_all(self):
            self._scheduler.remove([sample for parent in self._in_flight() for sample in parent.samples])
        """,
    ),
    "aborts-only-what-runs": Fault(
        "test_abort_ends_what_it_names_and_leaves_the_rest",
        "abort() ends what waits as well",
        """
        def _abort(self, names):
            known = [name for name in names if name in self._requests]
            super()._abort([name for name in known if any(each.logprobs for each in self._requests[name].samples)])
        """,
    ),
    "waits-for-its-requests": Fault(
        "test_pause_keep_holds_what_is_in_flight",
        "result(0.0) of request '0' did not return in 2 s",
        """
        def submit(self, requests):
            return [Wrapped(handle, lambda each, _: each.result()) for handle in super().submit(requests)]
        """,
        settings="timeout_s = 2.0\nlong_units = 200",
    ),
    "aborts-everything": Fault(
        "test_abort_ends_what_it_names_and_leaves_the_rest",
        "a request that was in flight beside an aborted one ended with",
        """
        def abort(self, request_ids):
            super().abort(list(self._requests))
        """,
    ),
    "never-pauses": Fault(
        "test_pause_keep_holds_what_is_in_flight",
        "units were generated after pause('keep') returned",
        """
        def pause(self, mode="keep"):
            pass
        """,
        settings="long_units = 200",
    ),
    "hangs": Fault(
        "test_pause_keep_holds_what_is_in_flight",
        "pause('keep') did not return in 2 s",
        """
        def pause(self, mode="keep"):
            threading.Event().wait()
        """,
        settings="timeout_s = 2.0",
    ),
    "samples-nonsense": Fault(
        "test_weights_that_overflow_are_told_never_sampled",
        "generating with weights that are not finite was accepted",
        """
        def _take(self, plan, tokens, logprobs):
            super()._take(plan, tokens, [-1.0] * len(logprobs))
        """,
    ),
    "counts-twice": Fault(
        "test_counters_tell_what_happened",
        "stats().generated_units is",
        """
        def stats(self):
            stats = super().stats()
            return attrs.evolve(stats, generated_units=2 * stats.generated_units)
        """,
    ),
    "always-healthy": Fault(
        "test_shutdown_ends_what_is_in_flight_and_leaves_nothing_behind",
        "health() of an engine that is shut down was accepted; raise EngineError",
        """
        def health(self):
            pass
        """,
    ),
    "leaves-a-thread": Fault(
        "test_shutdown_ends_what_is_in_flight_and_leaves_nothing_behind",
        "there still are: poller",
        """
        def start(self):
            threading.Thread(target=threading.Event().wait, name="poller", daemon=True).start()
            super().start()
        """,
        settings="timeout_s = 2.0",
    ),
    "records-of-shared-prompts-lost": Fault(
        "test_every_unit_that_was_computed_has_its_record",
        "differs by",
        """
        def start(self):
            super().start()
            if self._recorder is None:
                return
            keep = self._recorder.keep
            def forgetful(plan):
                keep(plan)
                for target in (target for fork in plan.forks for target in fork.targets):
                    for rows in plan.sequences[target].records.values():
                        rows.zero_()
            self._recorder.keep = forgetful
        """,
        capabilities="records=True, prefix_sharing=True",
    ),
    "records-of-old-weights-kept": Fault(
        "test_every_unit_that_was_computed_has_its_record",
        "keep records with their units when slots move, prompts are shared and the cache is computed anew",
        """
        def start(self):
            super().start()
            if self._recorder is None:
                return
            keep, known = self._recorder.keep, {}
            def once(plan):
                before = [(each, name, rows.clone()) for each in plan.sequences for name, rows in each.records.items()]
                keep(plan)
                for each, name, rows in before:
                    first = known.get(each, 0)
                    each.records[name][:first] = rows[:first]
                known.update((each, len(each.tokens)) for each in plan.sequences)
            self._recorder.keep = once
        """,
        capabilities="records=True, prefix_sharing=True",
    ),
    "goes-on-without-weights": Fault(
        "test_it_sleeps_and_goes_on_with_the_weights_that_it_is_given_then",
        "resume() of an engine that slept and was given no weights since was accepted",
        """
        def wake(self):
            super().wake()
            self._is_blank = False
        """,
        capabilities="sleeps=True, prefix_sharing=True",
    ),
    "sleeps-on-an-old-cache": Fault(
        "test_it_sleeps_and_goes_on_with_the_weights_that_it_is_given_then",
        "log-probs are not the trainer's",
        """
        def _free(self):
            self._storages = self._loaded.storages()
            self._storages.free()
        """,
        capabilities="sleeps=True, prefix_sharing=True",
    ),
    "preflight-in-a-form-of-its-own": Fault(
        "test_its_preflight_says_nothing_against_what_it_does_here",
        "preflight() returned []; return a Preflight",
        more=", preflight=lambda options, planned: []",
    ),
    "refuses-what-it-does": Fault(
        "test_its_preflight_says_nothing_against_what_it_does_here",
        "preflight() refuses a run such as these tests generate for: too hot",
        more=", preflight=lambda options, planned: Preflight(problems=('too hot',))",
    ),
    "says-now-this-now-that": Fault(
        "test_its_preflight_says_nothing_against_what_it_does_here",
        "it must depend on what it is given alone",
        more=", preflight=lambda options, planned, said=[]: Preflight(absent='x' * (said.append(1) or len(said) > 1))",
    ),
    "declares-what-nobody-can-prove": Fault(
        "test_declarations_hold_together",
        "mesh_axes declares pp",
        capabilities="mesh_axes=frozenset({'pp', 'tp'})",
    ),
    "one-process-for-two": Fault(
        "test_the_layout_covers_each_tensor_once",
        "the layout names ranks [0]; tensor_parallel asks for 2",
        """
        def __init__(self, options, context):
            super().__init__(options, attrs.evolve(context, tensor_parallel=1))
        """,
        capabilities="mesh_axes=frozenset({'tp'})",
        settings="tensor_parallel = 2",
    ),
    "two-that-hold-all": Fault(
        "test_the_layout_covers_each_tensor_once",
        "split it, so that none holds all of it",
        """
        def __init__(self, options, context):
            super().__init__(options, attrs.evolve(context, tensor_parallel=1))
        def layout(self):
            return dict.fromkeys((0, 1), super().layout()[0])
        """,
        capabilities="mesh_axes=frozenset({'tp'})",
        settings="tensor_parallel = 2",
    ),
    "several-undeclared": Fault(
        "test_the_layout_covers_each_tensor_once",
        "mesh_axes does not declare tp: declare it",
        settings="tensor_parallel = 2",
    ),
}


def module(fault):
    body = textwrap.indent(textwrap.dedent(fault.body).strip(), "    ")
    return MODULE.format(body=body, capabilities=fault.capabilities, more=fault.more)


@pytest.fixture(scope="module")
def outcomes(run_kit):
    declared = (
        "records=True, prefix_sharing=True, sleeps=True, quantizations=frozenset({'fp8', 'mxfp8', 'mxfp4', 'nvfp4'})"
    )
    modules = {
        "good": MODULE.format(
            body="    pass", capabilities=declared, more=", preflight=lambda options, planned: Preflight()"
        )
    }
    bodies = {"good": only(EngineConformance, [fault.test for fault in PLANTED.values()])}
    for name, fault in PLANTED.items():
        modules[name] = module(fault)
        bodies[name] = f"{only(EngineConformance, [fault.test])}{fault.settings}\n"
    return run_kit("engine", modules, bodies=bodies)


@pytest.mark.slow
def test_each_fault_is_named_and_none_where_there_is_none(outcomes):
    assert {each.result for each in outcomes["good"]} - {"not run"} == {"passed"}
    assert unnamed(outcomes, {name: (fault, fault.test, fault.message) for name, fault in PLANTED.items()}) == {}
