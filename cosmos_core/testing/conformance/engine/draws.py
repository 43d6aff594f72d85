"""What is drawn, against what it is drawn from: the frequencies, each request's temperature, the order of samples."""

from __future__ import annotations

from typing import Final

import pytest
import torch

from cosmos_core.protocols import EngineCapabilities, Generated, Request
from cosmos_core.testing.conformance.engine.pricing import Pricer
from cosmos_core.testing.conformance.engine.setting import TEMPERATURE, EngineSetting, Start, needs_tokens, tokens_of
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Payload

_DRAWS: Final = 512
_STANDARD_ERRORS: Final = 5.0


class DrawTests(EngineSetting):
    """How units are drawn."""

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
