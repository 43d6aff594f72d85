"""Faults in engines of latents that the kit must name: each is the diffusion engine with one thing done wrong."""

from __future__ import annotations

import textwrap

import attrs
import pytest

from cosmos_core.testing import DenoisingEngineConformance
from tests.nightly.kit.outcomes import only, unnamed

MODULE = """
import attrs
import torch
from cosmos_core.protocols import EngineCapabilities, Provider, hookimpl
from cosmos_core.protocols import Preflight
from cosmos_engine_diffusion.engine import DiffusionEngine
from cosmos_engine_diffusion.options import DiffusionOptions
from cosmos_engine_diffusion.preflight import preflight

class Engine(DiffusionEngine):
{body}

@hookimpl
def cosmos_engine():
    capabilities = EngineCapabilities(payload_kinds=frozenset({{"latents"}}), media=True, renders={renders})
    return Provider(create=Engine, options=DiffusionOptions, capabilities=capabilities, preflight={preflight})
"""


@attrs.frozen
class Fault:
    """A body for the engine, the test that must catch it, and what that test must say."""

    test: str
    message: str
    body: str = "pass"
    renders: bool = True
    preflight: str = "preflight"


PLANTED = {
    "sums-over-dims": Fault(
        "test_logprobs_are_those_of_the_trainer",
        "log-probs are not the trainer's: unit",
        """
        def _advance(self):
            super()._advance()
            for sample in self._denoisers.running:
                newest = sample.decisions[-1:]
                sample.decisions[-1:] = [attrs.evolve(each, logprob=96 * each.logprob) for each in newest]
        """,
    ),
    "draws-too-little-noise": Fault(
        "test_the_noise_of_transitions_is_standard_normal",
        "variances from its mean on average: of what is drawn with",
        """
        def _advance(self):
            for sample in self._denoisers.admit():
                sample.start(self._context.device)
                whole = sample.parent.schedule.discretization
                if not hasattr(self, "_less"):
                    self._less = attrs.evolve(
                        whole, steps=tuple(attrs.evolve(step, std=0.5 * step.std) for step in whole.steps)
                    )
                sample.parent.schedule = attrs.evolve(sample.parent.schedule, discretization=self._less)
            super()._advance()

        def _end(self, sample):
            sample.decisions = [
                attrs.evolve(each, step=attrs.evolve(each.step, std=2 * each.step.std)) for each in sample.decisions
            ]
            super()._end(sample)
        """,
    ),
    "denoises-given-frames": Fault(
        "test_a_payload_of_latents_holds_what_its_kind_says",
        "frames that the prompt gives are others in a state or the sample",
        """
        def _end(self, sample):
            sample.state = sample.state + 0.01
            super()._end(sample)
        """,
    ),
    "keeps-no-sample": Fault(
        "test_a_payload_of_latents_holds_what_its_kind_says",
        "array 'sample' of a payload of 5 units is None",
        """
        def _end(self, sample):
            super()._end(sample)
            arrays = {name: each for name, each in sample.finished.arrays.items() if name != "sample"}
            sample.finished = attrs.evolve(sample.finished, arrays=arrays)
        """,
    ),
    "forgets-the-prompt": Fault(
        "test_logprobs_are_those_of_the_trainer",
        "the payload's 'text' is not the request's",
        """
        def _end(self, sample):
            super()._end(sample)
            arrays = {name: each for name, each in sample.finished.arrays.items() if name != "text"}
            sample.finished = attrs.evolve(sample.finished, arrays=arrays)
        """,
    ),
    "evaluates-with-noise": Fault(
        "test_without_noise_a_sample_depends_on_the_first_noise_alone",
        "at temperature 0, a sample of seed 3 is not that of seed 3",
        """
        def _end(self, sample):
            sample.state = sample.state + torch.randn(sample.state.shape)
            super()._end(sample)
        """,
    ),
    "renders-another": Fault(
        "test_samples_are_rendered",
        "is it another sample's?",
        """
        def _end(self, sample):
            super()._end(sample)
            frames = sample.media.arrays["frames"]
            other = attrs.evolve(frames, data=bytes(255 - each for each in frames.data))
            sample.media = attrs.evolve(sample.media, arrays={**sample.media.arrays, "frames": other})
        """,
    ),
    "renders-nothing": Fault(
        "test_samples_are_rendered",
        "a sample has no media, and `renders` is declared",
        """
        def _finish(self, ended):
            for sample in ended:
                sample.media = None
            super()._finish(ended)
        """,
    ),
    "renders-undeclared": Fault(
        "test_samples_are_rendered", "a sample has media, and `renders` is not declared: declare it", renders=False
    ),
    "ignores-top-k": Fault(
        "test_an_impossible_request_is_refused_with_its_whole_call",
        "a request for samples of the likeliest outcomes was accepted",
        """
        def submit(self, requests):
            return super().submit(
                [attrs.evolve(each, sampling=attrs.evolve(each.sampling, top_k=0)) for each in requests]
            )
        """,
    ),
    "preflight-regressions": Fault(
        "test_decisions_are_those_that_it_foresees",
        "preflight() says decisions = 'regressions', and a sample has transitions",
        preflight="lambda options, planned: Preflight(decisions='regressions')",
    ),
    "preflight-too-few": Fault(
        "test_decisions_are_those_that_it_foresees",
        "preflight() says most_decisions = 2, and a sample has 5",
        preflight="lambda options, planned: Preflight(decisions='transitions', most_decisions=2)",
    ),
    "draws-by-the-batch": Fault(
        "test_a_unit_is_drawn_from_its_seed_its_sample_and_its_place",
        "a request drew other units among others than alone",
        """
        def _admit(self, request):
            parent = super()._admit(request)
            parent.request = attrs.evolve(request, seed=request.seed + self._number)
            return parent
        """,
    ),
    "mistakes-versions": Fault(
        "test_an_update_in_flight_loses_and_restarts_nothing",
        "units were generated before the first update, but",
        """
        def _apply(self, update, cache):
            for sample in self._denoisers.running:
                sample.decisions[-1:] = [attrs.evolve(each, version=update.version) for each in sample.decisions[-1:]]
            return super()._apply(update, cache)
        """,
    ),
    "goes-on-with-old-weights": Fault(
        "test_an_update_in_flight_loses_and_restarts_nothing",
        "log-probs are not the trainer's: unit",
        """
        def _apply(self, update, cache):
            digest = super()._apply(update, cache)
            # What generates is a copy of what was loaded first.
            self._module = self._context.model.build(seed=1, dtype=torch.float32, device=torch.device("cpu"))
            return digest
        """,
    ),
}


@pytest.fixture(scope="module")
def outcomes(run_kit):
    modules = {"good": MODULE.format(body="    pass", renders=True, preflight="preflight")}
    bodies = {"good": only(DenoisingEngineConformance, [fault.test for fault in PLANTED.values()])}
    for name, fault in PLANTED.items():
        body = textwrap.indent(textwrap.dedent(fault.body).strip(), "    ")
        modules[name] = MODULE.format(body=body, renders=fault.renders, preflight=fault.preflight)
        bodies[name] = only(DenoisingEngineConformance, [fault.test])
    return run_kit("engine", modules, body="long_units = 60\n", bodies=bodies, kit="DenoisingEngineConformance")


@pytest.mark.slow
def test_each_fault_is_named_and_none_where_there_is_none(outcomes):
    assert {each.result for each in outcomes["good"]} - {"not run"} == {"passed"}
    assert unnamed(outcomes, {name: (fault, fault.test, fault.message) for name, fault in PLANTED.items()}) == {}
