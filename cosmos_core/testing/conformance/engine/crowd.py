"""New weights under a full engine: as many sequences in flight as a replica has, not a handful."""

from __future__ import annotations

from typing import Final

import pytest
import torch

from cosmos_core.protocols import CachePolicy, EngineCapabilities, Generated
from cosmos_core.testing.conformance.engine.driver import EngineDriver
from cosmos_core.testing.conformance.engine.pricing import Pricer
from cosmos_core.testing.conformance.engine.setting import EngineSetting, Start
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Payload
from cosmos_core.weights.digest import digest_of

_CROWD: Final = 64
_VERSION: Final = 5


class CrowdTests(EngineSetting):
    """What happens to 64 sequences in flight when the weights change."""

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
