"""Tests of requests in flight: pauses, aborts, callbacks, counters, and the end."""

from __future__ import annotations

import threading
import time
from concurrent import futures
from typing import Final

import psutil
import torch

from cosmos_core.errors import EngineError
from cosmos_core.protocols import FinishReason, Generated, Handle, PauseMode
from cosmos_core.testing.conformance.engine.subject import EngineDriver, Readings, Subject, flat, refuses
from cosmos_core.testing.conformance.plugin import fault

_STILL_S: Final = 0.1


class FlightTests(Readings):
    """Tests of requests in flight."""

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

    def test_shutdown_ends_what_is_in_flight_as_aborted(self, subject: Subject) -> None:
        """Whoever waits for a request must hear of the end, in a pause as well."""
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

    def test_shutdown_leaves_nothing_behind(self, subject: Subject) -> None:
        """A replica that ends must free its device and let its process end."""
        threads, children = set(threading.enumerate()), set(psutil.Process().children(recursive=True))
        engine = subject.start()
        engine.generate([subject.request("one", 0)])
        engine.shutdown()
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
