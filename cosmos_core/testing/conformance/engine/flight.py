"""Tests of requests in flight and of new weights: pauses, aborts, callbacks, counters, the end; whole updates."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import ClassVar, Final

import attrs
import psutil
import torch

from cosmos_core.errors import EngineError, WeightSyncError
from cosmos_core.protocols import (
    CachePolicy,
    EngineCapabilities,
    FinishReason,
    Generated,
    Handle,
    Model,
    PauseMode,
    Request,
)
from cosmos_core.protocols.quantization import FORMATS, Format
from cosmos_core.testing.conformance.engine.subject import EngineDriver, Pricer, Readings, Subject, flat, refuses
from cosmos_core.testing.conformance.plugin import fault, needs
from cosmos_core.weights import slices
from cosmos_core.weights.digest import digest_of
from cosmos_core.weights.quantization import quantise_tensors
from cosmos_core.weights.shards import ShardMap, TensorFacts, cast, dtype_name

_STILL_S: Final = 0.1


class FlightTests(Readings):
    """Tests of requests in flight and of new weights."""

    tensor_parallel: ClassVar[int] = 1

    def test_pause_keep_holds_what_is_in_flight(self, subject: Subject) -> None:
        """New weights come in during such a pause: nothing is lost, repeated or generated; pausing twice is once."""
        engine = subject.start()
        handles = engine.submit(subject.long(3))
        held = engine.pause_in_flight(handles, 12)
        _expect_still(engine, "pause('keep') returned")
        engine.pause("keep")
        _expect_held(subject, engine, "keep", others=3)
        results = flat(map(engine.results, handles))
        subject.expect_whole(results, f"was paused with {held} units generated")
        subject.expect_logprobs(results)

    def test_pause_abort_ends_what_is_in_flight_with_partial_results(self, subject: Subject) -> None:
        """A partial result is still worth its log-probs."""
        engine = subject.start(max_in_flight=2)
        handles = engine.submit(subject.long(4))
        engine.wait_for_units(10)
        engine.pause("abort")
        ended = _aborted(engine, handles, "pause('abort')")
        subject.expect_logprobs(ended)
        made, told = sum(generated.num_units for generated in ended), engine.stats().generated_units
        if made != told:
            fault(f"{told} units were generated before pause('abort'), the partial results hold {made}; keep them all")
        for mode in ("keep", "wait"):
            engine.pause(mode)
        _expect_held(subject, engine, "abort")

    def test_pause_wait_finishes_what_is_in_flight(self, subject: Subject) -> None:
        """A request that comes while it waits is held: under steady traffic it would never return."""
        engine = subject.start(max_in_flight=2)
        handles = engine.submit(subject.long(3))
        with futures.ThreadPoolExecutor(1) as other_thread:
            paused = other_thread.submit(engine.pause, "wait")
            # The call is given its time to begin.
            engine.wait_for_units(self.long_units)
            (late,) = engine.submit([subject.request("late", 3, max_units=3)])
            paused.result()
        subject.expect_whole(_at_once(engine, handles), "was waited for by pause('wait')")
        if engine.is_done(late):
            fault("a request that came during pause('wait') was finished before resume(); hold it until then")
        _expect_held(subject, engine, "wait", others=1)
        subject.expect_whole(engine.results(late), "came during pause('wait')", 3)

    def test_abort_ends_what_it_names_and_leaves_the_rest(self, subject: Subject) -> None:
        """A prompt that is no longer wanted must not cost the others anything, nor get a slot that it waits for."""
        engine = subject.start(max_in_flight=2)
        handles = engine.submit(subject.long(3))
        engine.wait_for_units(12)
        # The third one waits for a slot, and must never get one.
        engine.abort(["2", "1", "never heard of"])
        ((going,), (aborted,), (waiting,)) = map(engine.results, handles)
        if waiting.reason is not FinishReason.ABORTED or waiting.num_units:
            fault(
                f"a request that was aborted while it waited for a slot ended with {waiting.reason} and "
                f"{waiting.num_units} units; abort() ends what waits as well, as ABORTED with no units"
            )
        if aborted.reason is not FinishReason.ABORTED or not 0 < aborted.num_units < self.decisions(self.long_units):
            fault(
                f"an aborted request ended with {aborted.reason} and {aborted.num_units} of {self.long_units} units; "
                "end it at the next unit with FinishReason.ABORTED, what was generated kept"
            )
        subject.expect_whole([going], "was in flight beside an aborted one")
        subject.expect_logprobs([going, aborted])

    def test_shutdown_ends_what_is_in_flight_and_leaves_nothing_behind(self, subject: Subject) -> None:
        """Whoever waits for a request must hear of the end, in a pause as well; a process must be able to end."""
        threads, children = set(threading.enumerate()), set(psutil.Process().children(recursive=True))
        for is_paused in (False, True):
            engine = subject.start()
            handles = engine.submit(subject.long(2))
            engine.wait_for_units(4)
            if is_paused:
                engine.pause("keep")
            engine.shutdown()
            engine.shutdown()
            _aborted(engine, handles, "shutdown()")
            refuses(EngineError, "health() of an engine that is shut down", engine.health)
            refuses(EngineError, "submit() to an engine that is shut down", engine.submit, subject.long(1))
        end = time.monotonic() + self.timeout_s
        while left := [
            *(each.name for each in set(threading.enumerate()) - threads if not each.name.startswith("kit:")),
            *(f"process {child.pid}" for child in set(psutil.Process().children(recursive=True)) - children),
        ]:
            if time.monotonic() > end:
                fault(f"{self.timeout_s:g} s after shutdown() there still are: {', '.join(left)}; join them")
            time.sleep(0.01)

    def test_weights_that_overflow_are_told_never_sampled(self, subject: Subject) -> None:
        """A log-prob that is not finite poisons the training; the replica learns of it from `health`."""
        engine = subject.start()
        engine.health()
        engine.load(1, {name: torch.full_like(each, torch.nan) for name, each in subject.pricer.tensors(0).items()})

        def generate() -> object:
            return [self.logprobs(each).tolist() for (each,) in engine.generate([subject.request("x", 0)])]

        refuses(EngineError, "generating with weights that are not finite", generate)
        refuses(EngineError, "health() after a request failed", engine.health)

    def test_callbacks_are_called_once_and_may_use_the_engine(self, subject: Subject) -> None:
        """A completion is scored once; what is asked for on the engine's own thread must not wait for that thread."""
        engine, calls = subject.start(), list[Handle]()
        (handle,) = engine.submit([subject.request("one", 0)])
        handle.add_done_callback(calls.append)
        engine.results(handle)
        engine.generate([subject.request("another", 0)])
        if calls != [handle]:
            fault(f"a callback was called {len(calls)} times with {calls}; call it once, with the handle")
        handle.add_done_callback(calls.append)
        if len(calls) != 2:
            fault("a callback that is added to a finished request is not called at once")
        finished, count = threading.Event(), iter(range(3))

        def go_on(_: Handle) -> None:
            # On the engine's thread: a method that waits for that thread would wait for ever.
            engine.engine.stats()
            engine.engine.abort(["nothing"])
            if (number := next(count, None)) is None:
                finished.set()
            else:
                (following,) = engine.engine.submit([subject.request(number, 0, max_units=2)])
                following.add_done_callback(go_on)

        (first,) = engine.submit([subject.request("first", 0, max_units=2)])
        first.add_done_callback(go_on)
        if not finished.wait(self.timeout_s):
            fault("a callback that calls submit(), abort() and stats() never comes to its end")

    def test_counters_tell_what_happened(self, subject: Subject) -> None:
        """Throughput and idle time are reported from them; declared sharing saves all prompts of a group but one."""
        engine = subject.start()
        handles = engine.submit([*subject.long(3), subject.request("group", 3, num_samples=3)])
        seen = [engine.stats()]
        while not all(map(engine.is_done, handles)):
            seen.append(engine.stats())
            if seen[-1].num_running > 4:
                fault(f"stats().num_running is {seen[-1].num_running} with max_in_flight = 4")
            time.sleep(0.002)
        made = sum(each.num_units for each in flat(map(engine.results, handles)))
        last = engine.stats()
        if last.generated_units != made:
            fault(f"stats().generated_units is {last.generated_units}, the completions hold {made} units")
        if last.num_running or last.num_waiting or not last.prompt_units or last.weight_version:
            fault(f"after all is done, stats() is {last}")
        for name in ("generated_units", "prompt_units", "busy_s", "paused_s"):
            values = [getattr(each, name) for each in (*seen, last)]
            if values != sorted(values):
                fault(f"stats().{name} goes down; it counts since the start")
        if not subject.has_tokens or not subject.capabilities.prefix_sharing:
            return
        # A new one, which has kept no prompt of others.
        engine = subject.start()
        engine.generate([subject.request("group", 1, num_samples=4, max_units=3)])
        units, size = engine.stats().prompt_units, subject.prompts[1].arrays["prompt"].shape[0]
        if units != size:
            fault(f"a group of 4 processed {units} prompt units of a prompt of {size}; do not declare prefix_sharing")

    def test_the_layout_covers_each_tensor_once(self, subject: Subject, capabilities: EngineCapabilities) -> None:
        """The replica fetches what it names, in the recipe's precision; no rank may need memory for all of it."""
        if self.tensor_parallel > 1 and "tp" not in capabilities.mesh_axes:
            fault(f"tensor_parallel is {self.tensor_parallel}, and mesh_axes does not declare tp: declare it")
        for dtype in (torch.float32, torch.bfloat16):
            engine, tensors, name = subject.start(dtype=dtype), subject.pricer.tensors(1), dtype_name(dtype)
            published = {each: value.to(cast(value, dtype)) for each, value in tensors.items()}
            _expect_layout(engine, published, self.tensor_parallel)
            _expect_digest(engine.load(1, tensors), published, f"in {name}, to which publishers cast before")
            ((generated,),) = engine.generate([subject.request("one", 0)])
            if not self.logprobs(generated).isfinite().all():
                fault(f"with dtype {name}, log-probs are {self.logprobs(generated).tolist()}")

    def test_an_update_is_loaded_and_attested(self, subject: Subject) -> None:
        """Nothing is served on a version whose digest is not the published one; an older one may come again."""
        engine, tensors = subject.start(), {name: each.clone() for name, each in subject.pricer.tensors(1).items()}
        # The same requests before and after: what was kept of their prompts is old then.
        requests = [subject.request(index, index, num_samples=2) for index in range(3)]
        engine.generate(requests)
        _expect_digest(engine.load(6, tensors), tensors, "of whole slices")
        for tensor in tensors.values():
            # What was written belongs to the caller again: the engine must have copied it.
            tensor.zero_()
        _expect_weights(subject, engine, requests, 6, weights=1)
        # A run that is taken back to a checkpoint publishes versions again, with other weights; in parts, in any order.
        tensors = subject.pricer.tensors(2)
        engine.begin_update(5)
        engine.write_all(tensors, reversed(engine.parts(2)))
        _expect_digest(engine.commit_update(), tensors, "written in halves")
        _expect_weights(subject, engine, requests, 5, weights=2)

    def test_an_incomplete_update_is_refused_and_nothing_changes(self, subject: Subject) -> None:
        """Half-loaded weights would generate something that no trainer can price."""
        engine, tensors = subject.start(), subject.pricer.tensors(1)
        refuses(WeightSyncError, "commit_update() without begin_update()", engine.commit_update)
        engine.begin_update(2)
        refuses(WeightSyncError, "begin_update() while an update is open", engine.begin_update, 3)
        foreign = [(max(engine.layout()) + 1, piece, dtype) for _, piece, dtype in engine.parts()[:1]]
        write = "write() for a rank that the layout does not have"
        refuses(WeightSyncError, write, engine.write_all, tensors, foreign)
        engine.write_all(tensors, engine.parts()[1:])
        refuses(WeightSyncError, "an update that lacks one slice", engine.commit_update)
        request = [subject.request("after a refused update", 0)]
        _expect_weights(subject, engine, request, 0)
        engine.abort_update()
        engine.abort_update()
        _expect_weights(subject, engine, request, 0)
        parts = engine.parts(2)
        alike = (index for index in range(1, len(parts)) if parts[index][1].shape == parts[index - 1][1].shape)
        if (twice := next(alike, None)) is not None:
            # Counting bytes is not enough: a retry sends a slice again.
            parts[twice] = parts[twice - 1]
            engine.begin_update(1)
            engine.write_all(tensors, parts)
            refuses(WeightSyncError, "an update with one slice twice and another missing", engine.commit_update)
            engine.abort_update()
        for weights in (1, 2):
            tensors = subject.pricer.tensors(weights)
            _expect_digest(engine.load(2, tensors), tensors, "after an aborted one, which abort_update() must forget")

    def test_an_update_in_flight_loses_and_restarts_nothing(self, subject: Subject) -> None:
        """Generation goes on; each unit tells which weights made it, and what starts later uses nothing older."""
        needs(subject.capabilities.in_flight_update, "in_flight_update")
        # Over a kept cache, the same weights as before change nothing.
        _expect_update_in_flight(subject, cache="keep", loads={3: 0, 4: 4})
        _expect_update_in_flight(subject, cache="recompute", loads={3: 3, 4: 4})

    def test_the_next_turn_of_a_dialogue_is_what_it_would_be_afresh(self, subject: Subject) -> None:
        """An engine may keep what it computed for an earlier turn, and not over a recompute; it changes nothing."""
        needs(subject.has_tokens, "payload kind tokens")
        needs(subject.texts, "prompts of tokens alone")
        engine = subject.start(dialogues=True)
        first = [subject.request(index, index, seed=index, num_samples=2) for index in subject.texts[:3]]
        turns = subject.next_turns(flat(engine.generate(first)))
        reused = flat(engine.generate(turns))
        subject.expect_logprobs(reused)
        for version, weights in ((1, 1), (2, 0)):
            # What the first turns leave now is what the weights before computed.
            engine.generate(first)
            engine.load(version, subject.pricer.tensors(weights), "recompute")
            afresh = flat(engine.generate(turns))
            subject.expect_versions(afresh, {version})
            subject.expect_logprobs(afresh, weights=weights)
        if subject.capabilities.seeded and not all(map(subject.read.same, reused, afresh)):
            fault(
                "a next turn drew other units where an earlier one had left its cache than it did afresh; draws depend "
                "on the seed, the sample and the unit, whatever is in a cache"
            )

    def test_it_sleeps_and_goes_on_with_the_weights_that_it_is_given_then(self, subject: Subject) -> None:
        """Others use the memory meanwhile: nothing in flight is lost, and nothing is computed with what was there."""
        needs(subject.capabilities.sleeps, "sleeps")
        engine = subject.start(sleeps=True)
        handles = engine.submit(subject.long(3))
        refuses(EngineError, "sleep() of an engine that is not paused", engine.sleep)
        engine.pause_in_flight(handles, 12)
        engine.sleep()
        engine.sleep()
        refuses(EngineError, "resume() of an engine that sleeps", engine.resume)
        engine.wake()
        engine.wake()
        for what, call in {"resume()": engine.resume, "score()": lambda: engine.score([], temperature=1.0)}.items():
            refuses(EngineError, f"{what} of an engine that slept and was given no weights since", call)
        for number in (1, 2):
            tensors = subject.pricer.tensors(number)
            _expect_digest(engine.load(number, tensors), tensors, f"after sleep {number}")
            engine.resume()
            if number == 1:
                engine.pause("keep")
                engine.sleep()
                engine.wake()
        results = flat(map(engine.results, handles))
        subject.expect_whole(results, "was in flight while the engine slept")
        subject.expect_versions(results, {0, 1, 2})
        for version in (0, 1, 2):
            subject.expect_logprobs(results, weights=version, version=version)

    def test_quantised_weights_are_loaded_attested_and_computed_with(self, subject: Subject, model: Model) -> None:
        """The trainer can only correct for what it knows; a matrix in full would be sent in vain, and not attested."""
        needs(subject.capabilities.quantizations, "quantizations")
        for name, form in FORMATS.items():
            if name in subject.capabilities.quantizations:
                _expect_quantised(subject, model, form)


def _expect_held(subject: Subject, engine: EngineDriver, mode: PauseMode, others: int = 0) -> None:
    """Submit a request during a pause, fault it if it is not held until the pause ends, and end the pause."""
    (held,) = engine.submit([subject.request("held", 4, max_units=3)])
    _expect_still(engine, f"pause({mode!r}) returned and a request was submitted")
    if engine.is_done(held):
        fault(f"a request that was submitted during pause({mode!r}) ended before resume()")
    stats = engine.stats()
    if stats.num_waiting + stats.num_running != others + 1:
        fault(f"{others + 1} requests are held by a pause, but stats() tells of others running and waiting: {stats}")
    engine.resume()
    subject.expect_whole(engine.results(held), f"was submitted during pause({mode!r})", 3)


def _expect_still(engine: EngineDriver, since: str) -> None:
    before = engine.stats()
    time.sleep(_STILL_S)
    after = engine.stats()
    if after.generated_units != before.generated_units:
        fault(f"{after.generated_units - before.generated_units} units were generated after {since}")
    if not after.paused_s > before.paused_s:
        fault(f"stats().paused_s stays at {after.paused_s} after {since}; it is reported as idle time")


def _at_once(engine: EngineDriver, handles: list[Handle]) -> list[Generated]:
    for handle in handles:
        if not engine.is_done(handle):
            fault(f"request {handle.request.request_id!r} is not finished when the call that ends it has returned")
    return flat(map(engine.results, handles))


def _aborted(engine: EngineDriver, handles: list[Handle], call: str) -> list[Generated]:
    ended = _at_once(engine, handles)
    for generated in ended:
        if generated.reason is not FinishReason.ABORTED:
            fault(f"after {call}, what was in flight ends with {generated.reason}, not ABORTED")
    return ended


def _expect_layout(engine: EngineDriver, published: Mapping[str, torch.Tensor], num_ranks: int) -> None:
    """Fault a layout that is not of these tensors, lacks a part of one, or holds a part twice or all on one rank."""
    layout = engine.layout()
    if sorted(layout) != list(range(num_ranks)):
        fault(f"the layout names ranks {sorted(layout)}; tensor_parallel asks for {num_ranks}")
    expected = {name: TensorFacts(shape=tuple(t.shape), dtype=dtype_name(t.dtype)) for name, t in published.items()}
    found = ShardMap.of_layout(layout)
    for name in sorted(expected.keys() | found.tensors.keys()):
        if expected.get(name) != found.tensors.get(name):
            fault(
                f"the layout gives {name!r} as {found.tensors.get(name)}; it is published as {expected.get(name)}: "
                "list every parameter (tied ones once) and every persistent float buffer under its Hugging Face name, "
                "in the recipe's precision, and quantised matrices as `Format.tensors` says"
            )
    covered = sum(map(slices.size, slices.disjoint([piece for held in found.ranks.values() for piece in held])))
    whole = sum(tensor.numel() for tensor in published.values())
    if covered != whole:
        fault(f"the layout covers {covered} of the {whole} elements of the model")
    for rank, held in found.ranks.items():
        size = sum(map(slices.size, held))
        if size != sum(map(slices.size, slices.disjoint(held))):
            fault(f"rank {rank} lists elements more than once; its slices must be disjoint")
        if num_ranks > 1 and size >= whole:
            fault(f"rank {rank} holds {size} elements of a model of {whole}; split it, so that none holds all of it")


def _expect_digest(digest: str, written: Mapping[str, torch.Tensor], which: str) -> None:
    if digest != digest_of(written):
        fault(
            f"commit_update() gave the digest {digest!r}, not that of what was written, {digest_of(written)!r} "
            f"(an update {which})"
        )


def _expect_weights(
    subject: Subject, engine: EngineDriver, requests: Sequence[Request], version: int, weights: int = 0
) -> None:
    """Fault an engine that tells another version, or generates with something else than these weights."""
    told = engine.stats().weight_version
    if told != version:
        fault(f"stats().weight_version is {told} where version {version} is loaded; what was loaded stays loaded")
    results = flat(engine.generate(requests))
    subject.expect_versions(results, {version})
    subject.expect_logprobs(results, weights=weights)


def _expect_update_in_flight(subject: Subject, *, cache: CachePolicy, loads: Mapping[int, int]) -> None:
    """Fault updates that lose something in flight, make it again, or mistake which weights made a unit.

    `loads` are the weights of each version: the first is loaded in a pause, others while the engine generates. The last
    sample has no slot until the first two are done, after the updates: others of its group go on with the old prompt.
    """
    slots, short = 64, 3 * subject.read.long_units // 4
    requests = [subject.request("short", 0, max_units=short, num_samples=2), *subject.long(21, num_samples=3)]
    engine = subject.start(max_in_flight=slots)
    handles = engine.submit(requests)
    before = engine.pause_in_flight(handles, slots * subject.read.long_units // 3)
    stats = engine.stats()
    # Prompts may enter in pieces, so that the last ones have not begun; samples of a group may be counted as one.
    if (held := stats.num_running + stats.num_waiting) < len(requests):
        fault(f"stats() counts {held} running and waiting with {len(requests)} requests in flight")
    for number, (version, weights) in enumerate(loads.items()):
        if number:
            engine.wait_for_units(before + slots * number)
        tensors = subject.pricer.tensors(weights)
        _expect_digest(engine.load(version, tensors, cache), tensors, "under requests in flight")
        engine.resume()
    results = flat(map(engine.results, handles))
    subject.expect_whole(results[:2], "was in flight over an update", short)
    subject.expect_whole(results[2:], "was in flight over an update")
    made, told = sum(each.num_units for each in results), engine.stats().generated_units
    if made != told:
        fault(
            f"{told} units were generated for completions of {made}: an update made some of them again; what was "
            "generated stays"
        )
    subject.expect_versions(results, {0, *loads})
    old = sum(subject.read.versions(generated).count(0) for generated in results)
    if old != before:
        fault(
            f"{before} units were generated before the first update, but {old} carry the old version; a unit "
            "carries the version of the weights that made it"
        )
    if not all(subject.read.logprobs(generated).isfinite().all() for generated in results):
        fault(f"after an update with cache={cache!r}, some log-probs are not finite")
    if not any(generated.oldest_version for generated in results):
        fault(f"of {len(results)} samples in {slots} slots, none started after the updates; do all carry version 0?")
    is_exact = cache == "recompute" or not subject.read.has_cache
    for version, weights in {0: 0, **loads}.items():
        # Over a kept cache, units of new weights follow what the old ones left: no trainer's, but in fresh samples.
        those = results if is_exact or not weights else [each for each in results if each.oldest_version == version]
        subject.expect_logprobs(those, weights=weights, version=version)


def _expect_quantised(subject: Subject, model: Model, form: Format) -> None:
    """Fault matrices that are not held, attested and computed with as what codes and scales stand for."""
    matrices, engine = model.facts().matrices, subject.start(quantization=form.name)
    rounded = attrs.evolve(subject, pricer=Pricer(model, seed=1, form=form))
    first, second = (quantise_tensors(form, subject.pricer.tensors(weights), matrices) for weights in (0, 1))
    _expect_layout(engine, first, len(engine.layout()))
    requests = [subject.request(index, index, num_samples=2) for index in range(3)]
    _expect_weights(rounded, engine, requests, 0)
    _expect_digest(engine.load(1, second), second, f"of codes, scales and other tensors, with quantization {form.name}")
    _expect_weights(rounded, engine, requests, 1, weights=1)
