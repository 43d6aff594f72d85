"""Requests in flight: pauses, aborts, callbacks, counters, the end, and failure."""

from __future__ import annotations

import threading
import time
from concurrent import futures
from typing import Final

import psutil
import pytest
import torch

from cosmos_core.errors import EngineError
from cosmos_core.protocols import CachePolicy, EngineCapabilities, FinishReason, Generated, Handle, PauseMode, Request
from cosmos_core.testing.conformance.engine.subject import EngineDriver, EngineSetting, Pricer, Start, refuses
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Payload
from cosmos_core.weights.digest import digest_of

_STILL_S: Final = 0.1


class FlightTests(EngineSetting):
    """Tests of requests while the engine is paused, told to abort, shut down, or breaks."""

    # -- pauses -------------------------------------------------------------------------------------------------------

    def test_pause_keep_holds_what_is_in_flight(
        self, start: Start, pricer: Pricer, prompts: list[Payload], capabilities: EngineCapabilities
    ) -> None:
        """New weights come in during such a pause: nothing may be lost, repeated or generated."""
        engine = start()
        handles = engine.submit(self._long(prompts, 3))
        held = engine.pause_in_flight(handles, 12)
        self._check_still(engine, "pause('keep') returned")
        engine.resume()
        for handle in handles:
            for generated in engine.results(handle):
                self._check_whole(generated, f"was paused with {held} units generated")
                self.check_logprobs(pricer, generated, capabilities)

    def test_pause_abort_ends_what_is_in_flight_with_partial_results(
        self, start: Start, pricer: Pricer, prompts: list[Payload], capabilities: EngineCapabilities
    ) -> None:
        """A partial result is still worth its log-probs."""
        engine = start(max_in_flight=2)
        handles = engine.submit(self._long(prompts, 4))
        engine.wait_for_units(10)
        engine.pause("abort")
        ended = [generated for handle in handles for generated in self._at_once(engine, handle)]
        for generated in ended:
            if generated.reason is not FinishReason.ABORTED:
                fault(f"after pause('abort'), what was in flight ends with {generated.reason}, not ABORTED")
            self.check_logprobs(pricer, generated, capabilities)
        made, told = sum(generated.num_units for generated in ended), engine.stats().generated_units
        if made != told:
            fault(f"{told} units were generated before pause('abort'), the partial results hold {made}; keep them all")
        self._check_still(engine, "pause('abort') returned")

    def test_pause_wait_finishes_what_is_in_flight(self, start: Start, prompts: list[Payload]) -> None:
        """A request that comes while it waits is held: under steady traffic it would never return."""
        engine = start(max_in_flight=2)
        handles = engine.submit(self._long(prompts, 3))
        with futures.ThreadPoolExecutor(1) as other_thread:
            paused = other_thread.submit(engine.pause, "wait")
            # The call is given its time to begin.
            engine.wait_for_units(self.long_units)
            (late,) = engine.submit([self.request("late", prompts[3], max_units=3)])
            paused.result()
        for handle in handles:
            for generated in self._at_once(engine, handle):
                self._check_whole(generated, "was waited for by pause('wait')")
        self._check_still(engine, "pause('wait') returned")
        if engine.is_done(late):
            fault("a request that came during pause('wait') was finished before resume(); hold it until then")
        engine.resume()
        self._check_whole(engine.results(late)[0], "came during pause('wait')", 3)

    @pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
    def test_requests_of_a_pause_are_held_until_it_ends(
        self, start: Start, prompts: list[Payload], mode: PauseMode
    ) -> None:
        """The replica goes on leasing while weights are loaded."""
        engine = start()
        engine.pause(mode)
        handles = engine.submit([self.request("held", prompts[0], max_units=3)])
        self._check_still(engine, f"pause({mode!r}) returned and a request was submitted")
        if engine.is_done(handles[0]):
            fault(f"a request that was submitted during pause({mode!r}) ended before resume()")
        waiting = engine.stats().num_waiting + engine.stats().num_running
        if waiting != 1:
            fault(f"one request waits during a pause, but stats() tells of {waiting} running and waiting")
        engine.resume()
        (generated,) = engine.results(handles[0])
        self._check_whole(generated, f"was submitted during pause({mode!r})", 3)

    def test_pausing_twice_is_pausing_once(self, start: Start, prompts: list[Payload]) -> None:
        """Weights that were loaded wrongly are loaded again under the same pause."""
        engine = start()
        for mode in ("keep", "keep", "wait"):
            engine.pause(mode)
        engine.resume()
        engine.generate([self.request("after", prompts[0])])
        engine.resume()
        engine.generate([self.request("again", prompts[0])])

    # -- aborts and the end -------------------------------------------------------------------------------------------

    def test_abort_ends_one_request_and_leaves_the_rest(
        self, start: Start, pricer: Pricer, prompts: list[Payload], capabilities: EngineCapabilities
    ) -> None:
        """A prompt that is no longer wanted must not cost the others anything."""
        engine = start()
        handles = engine.submit(self._long(prompts, 3))
        engine.wait_for_units(12)
        engine.abort(["1", "never heard of"])
        (aborted,) = engine.results(handles[1])
        if aborted.reason is not FinishReason.ABORTED or not 0 < aborted.num_units < self.decisions(self.long_units):
            fault(
                f"an aborted request ended with {aborted.reason} and {aborted.num_units} of {self.long_units} units; "
                "end it at the next unit with FinishReason.ABORTED, what was generated kept"
            )
        self.check_logprobs(pricer, aborted, capabilities)
        for index in (0, 2):
            (generated,) = engine.results(handles[index])
            self._check_whole(generated, "was in flight beside an aborted one")
            self.check_logprobs(pricer, generated, capabilities)

    def test_abort_ends_a_waiting_request(
        self, start: Start, pricer: Pricer, prompts: list[Payload], capabilities: EngineCapabilities
    ) -> None:
        """A request without a slot must never get one."""
        engine = start(max_in_flight=1)
        going, waiting = engine.submit(self._long(prompts, 2))
        engine.wait_for_units(4)
        engine.abort([waiting.request.request_id])
        (aborted,) = engine.results(waiting)
        if aborted.reason is not FinishReason.ABORTED or aborted.num_units:
            fault(
                f"a request that was aborted while it waited for a slot ended with {aborted.reason} and "
                f"{aborted.num_units} units; abort() ends what waits as well, as ABORTED with no units"
            )
        (generated,) = engine.results(going)
        self._check_whole(generated, "had the only slot while a waiting one was aborted")
        self.check_logprobs(pricer, generated, capabilities)

    @pytest.mark.parametrize("paused", [False, True], ids=["running", "paused"])
    def test_shutdown_ends_what_is_in_flight_as_aborted(
        self, start: Start, prompts: list[Payload], paused: bool
    ) -> None:
        """Whoever waits for a request must hear of the end."""
        engine = start()
        handles = engine.submit(self._long(prompts, 2))
        engine.wait_for_units(4)
        if paused:
            engine.pause("keep")
        engine.shutdown()
        engine.shutdown()
        for handle in handles:
            for generated in self._at_once(engine, handle):
                if generated.reason is not FinishReason.ABORTED:
                    fault(f"after shutdown(), what was in flight ends with {generated.reason}, not ABORTED")
        refuses(EngineError, engine.health, "health() of an engine that is shut down")
        refuses(EngineError, lambda: engine.submit(self._long(prompts, 1)), "submit() to an engine that is shut down")

    def test_shutdown_leaves_nothing_behind(self, start: Start, prompts: list[Payload]) -> None:
        """A replica that ends must free its device and let its process end."""
        threads, children = set(threading.enumerate()), set(psutil.Process().children(recursive=True))
        engine = start()
        engine.generate([self.request("one", prompts[0])])
        engine.shutdown()
        end = time.monotonic() + self.timeout_s
        while left := [
            *(thread.name for thread in set(threading.enumerate()) - threads if not thread.name.startswith("kit:")),
            *(f"process {child.pid}" for child in set(psutil.Process().children(recursive=True)) - children),
        ]:
            if time.monotonic() > end:
                fault(f"{self.timeout_s:g} s after shutdown() there still are: {', '.join(left)}; join them")
            time.sleep(0.01)

    def test_weights_that_overflow_are_told_never_sampled(
        self, start: Start, pricer: Pricer, prompts: list[Payload]
    ) -> None:
        """A log-prob that is not finite poisons the training; the replica learns of it from `health`."""
        engine = start()
        engine.health()
        engine.load(1, {name: torch.full_like(each, torch.nan) for name, each in pricer.tensors(0).items()})

        def generate() -> object:
            return [self.logprobs(each).tolist() for (each,) in engine.generate([self.request("x", prompts[0])])]

        refuses(EngineError, generate, "generating with weights that are not finite")
        refuses(EngineError, engine.health, "health() after a request failed")

    # -- callbacks and counters ---------------------------------------------------------------------------------------

    def test_callbacks_are_called_once(self, start: Start, prompts: list[Payload]) -> None:
        """A completion is scored once; a callback that is added late is called at once."""
        engine, calls = start(), list[Handle]()
        (handle,) = engine.submit([self.request("one", prompts[0])])
        handle.add_done_callback(calls.append)
        engine.results(handle)
        engine.generate([self.request("another", prompts[0])])
        if calls != [handle]:
            fault(f"a callback was called {len(calls)} times with {calls}; call it once, with the handle")
        handle.add_done_callback(calls.append)
        if len(calls) != 2:
            fault("a callback that is added to a finished request is not called at once")

    def test_callbacks_may_use_the_engine(self, start: Start, prompts: list[Payload]) -> None:
        """They run on the engine's thread: a method that waits for that thread would wait for ever."""
        engine = start()
        finished, count = threading.Event(), iter(range(3))

        def go_on(_: Handle) -> None:
            engine.engine.stats()
            engine.engine.abort(["nothing"])
            if (number := next(count, None)) is None:
                finished.set()
            else:
                (handle,) = engine.engine.submit([self.request(number, prompts[0], max_units=2)])
                handle.add_done_callback(go_on)

        (handle,) = engine.submit([self.request("first", prompts[0], max_units=2)])
        handle.add_done_callback(go_on)
        if not finished.wait(self.timeout_s):
            fault("a callback that calls submit(), abort() and stats() never comes to its end")

    def test_counters_tell_what_happened(self, start: Start, prompts: list[Payload]) -> None:
        """Throughput and idle time are reported from them."""
        engine = start()
        handles = engine.submit([*self._long(prompts, 3), self.request("group", prompts[3], num_samples=3)])
        seen = [engine.stats()]
        while not all(engine.is_done(handle) for handle in handles):
            seen.append(engine.stats())
            if seen[-1].num_running > 4:
                fault(f"stats().num_running is {seen[-1].num_running} with max_in_flight = 4")
            time.sleep(0.002)
        made = sum(each.num_units for handle in handles for each in engine.results(handle))
        seen.append(engine.stats())
        if seen[-1].generated_units != made:
            fault(f"stats().generated_units is {seen[-1].generated_units}, the completions hold {made} units")
        if seen[-1].num_running or seen[-1].num_waiting or not seen[-1].prompt_units or seen[-1].weight_version:
            fault(f"after all is done, stats() is {seen[-1]}")
        for name in ("generated_units", "prompt_units", "busy_s", "paused_s"):
            values = [getattr(each, name) for each in seen]
            if values != sorted(values):
                fault(f"stats().{name} goes down; it counts since the start")

    # -- what is common to these tests --------------------------------------------------------------------------------

    def _long(self, prompts: list[Payload], count: int) -> list[Request]:
        return [self.request(index, prompts[index], seed=index, max_units=self.long_units) for index in range(count)]

    def _check_whole(self, generated: Generated, what: str, units: int = 0) -> None:
        wanted = self.decisions(units or self.long_units)
        if generated.num_units != wanted or generated.reason is not self.whole:
            fault(
                f"a request that {what} ended with {generated.reason} and {generated.num_units} of {wanted} units; "
                "nothing may be lost"
            )

    @staticmethod
    def _check_still(engine: EngineDriver, since: str) -> None:
        before = engine.stats()
        time.sleep(_STILL_S)
        after = engine.stats()
        if after.generated_units != before.generated_units:
            fault(f"{after.generated_units - before.generated_units} units were generated after {since}")
        if not after.paused_s > before.paused_s:
            fault(f"stats().paused_s stays at {after.paused_s} after {since}; it is reported as idle time")

    @staticmethod
    def _at_once(engine: EngineDriver, handle: Handle) -> list[Generated]:
        if not engine.is_done(handle):
            fault(f"request {handle.request.request_id!r} is not finished when the call that ends it has returned")
        return engine.results(handle)


_CROWD: Final = 64
_VERSION: Final = 5


class CrowdTests(EngineSetting):
    """Tests of 64 sequences in flight when the weights change."""

    @pytest.mark.parametrize("cache", ["recompute", "keep"])
    def test_an_update_under_64_sequences_in_flight(
        self,
        start: Start,
        pricer: Pricer,
        prompts: list[Payload],
        capabilities: EngineCapabilities,
        cache: CachePolicy,
    ) -> None:
        """None is lost, none restarted, and each unit has the version and the log-prob of the weights that made it."""
        if not capabilities.in_flight_update:
            pytest.skip("not declared: in_flight_update")
        engine = start(max_in_flight=_CROWD)
        handles = engine.submit(
            [
                self.request(index, prompts[index % len(prompts)], seed=index, max_units=self.long_units)
                for index in range(_CROWD)
            ]
        )
        before = engine.pause_in_flight(handles, _CROWD * self.long_units // 3)
        stats = engine.stats()
        # Prompts may enter in pieces, so that the last ones have not begun.
        if (held := stats.num_running + stats.num_waiting) != _CROWD:
            fault(
                f"stats() counts {stats.num_running} running and {stats.num_waiting} waiting, {held} in all, with "
                f"{_CROWD} requests in flight"
            )
        if engine.load(_VERSION, pricer.tensors(1), cache) != digest_of(pricer.tensors(1)):
            fault("commit_update() under requests in flight gave a digest that is not that of what was written")
        engine.resume()
        results = [generated for handle in handles for generated in engine.results(handle)]
        self._check_all_there(engine, results)
        self._check_made(results, before)
        for weights, version in ((0, 0), (1, _VERSION)):
            # With a kept cache, later units are of the new weights over what the old ones left: no trainer's.
            if version == 0 or cache == "recompute" or not self.has_cache:
                self._check_priced(pricer, results, capabilities, version, weights)

    def _check_all_there(self, engine: EngineDriver, results: list[Generated]) -> None:
        wanted = self.decisions(self.long_units)
        for index, generated in enumerate(results):
            if generated.num_units != wanted or generated.reason is not self.whole:
                fault(
                    f"request {index} of {_CROWD} in flight over an update ended with {generated.reason} and "
                    f"{generated.num_units} of {wanted} units; none may be lost"
                )
            if not self.logprobs(generated).isfinite().all():
                fault(f"request {index} of {_CROWD} in flight over an update has log-probs that are not finite")
        made = engine.stats().generated_units
        if made != _CROWD * wanted:
            fault(
                f"{made} units were generated for completions of {_CROWD * wanted}: an update made some of "
                "them again; what was generated stays"
            )

    def _check_made(self, results: list[Generated], before: int) -> None:
        versions = [self.versions(generated) for generated in results]
        for index, of in enumerate(versions):
            if of != sorted(of) or not set(of) <= {0, _VERSION}:
                fault(f"versions of request {index}'s units are {of}; only 0, then {_VERSION}, were loaded")
        old = sum(of.count(0) for of in versions)
        if old != before:
            fault(
                f"{before} units were generated before the update, but {old} carry the old version; a unit carries the "
                "version of the weights that made it"
            )

    def _check_priced(
        self, pricer: Pricer, results: list[Generated], capabilities: EngineCapabilities, version: int, weights: int
    ) -> None:
        temperature = self.temperature if capabilities.logprob_semantics == "processed" else 1.0
        priced = pricer.logprobs([each.payload for each in results], temperature=temperature, weights=weights)
        for index, (generated, theirs) in enumerate(zip(results, priced, strict=True)):
            made = torch.tensor(self.versions(generated)) == version
            apart = (self.logprobs(generated) - theirs).abs()[made]
            if apart.numel() and not apart.max() <= self.tolerance:
                fault(
                    f"request {index} of {_CROWD} in flight over an update: log-probs of version {version} are "
                    f"{apart.max():.4f} from the trainer's under those weights; recompute all of what is cached"
                )
