"""What is refused before any process starts."""

import torch

from cosmos_core.protocols import PlannedRun, Sampling
from cosmos_core.testing.conformance.engine.latents import TinyDenoiser
from cosmos_engine_diffusion.options import DiffusionOptions
from cosmos_engine_diffusion.preflight import preflight


def told(**changes):
    return said_before(**changes).problems


def said_before(*, model=None, sampling=None, evaluation=None, temperatures=(), **options):
    samplings = {"rollout.sampling": Sampling(**{"max_units": 10, **(sampling or {})})}
    samplings = {} if sampling is False else samplings
    samplings |= {"evaluation": Sampling(temperature=0.0, max_units=10)} if evaluation is None else evaluation
    model = model or TinyDenoiser()
    planned = PlannedRun(
        model=model,
        facts=TinyDenoiser().facts(),
        device="cpu",
        has_gpu=False,
        precision="float32",
        temperatures={f"{key}.temperature": each.temperature for key, each in samplings.items()} | dict(temperatures),
        shows_media=False,
        samplings=samplings,
    )
    return preflight(DiffusionOptions(**options), planned)


def test_what_fits_is_not_refused():
    for options in [
        {},
        {"sampler": "cps"},
        {"sampler": "edm", "trained": "even"},
        {"sampling": {"max_units": 2}},
        {"sampler": "edm", "sampling": {"max_units": 3}},
        {"sampler": "euler", "sampling": False},
        {"sampler": "euler", "regressions": 1, "sampling": {"max_units": 1}},
        {"sampling": {"temperature": 0.0, "max_units": 1}},
        {"trained": "window", "shared_prefix": True},
        {"trained": "window", "window_start": 7},
        {"sampler": "unipc", "regressions": 2, "evaluation_sampler": "unipc"},
        {"temperatures": {"policy.temperature": 0.0, "environment.temperature": 1.0}},
    ]:
        assert told(**options) == ()


def test_what_does_not_fit_is_named_once():
    for asked, said in [
        ({"model": torch.nn.Linear(1, 1)}, "rollout.engine.plugin: 'diffusion' denoises, and Linear is no world model"),
        ({"sampler": "euler"}, "rollout.engine.options.sampler: 'euler' adds no noise"),
        ({"sampler": "euler", "trained": "window"}, "rollout.engine.options.sampler: 'euler' adds no noise"),
        ({"sampler": "cps", "regressions": 2}, "rollout.engine.options.sampler: 'cps' adds noise"),
        ({"shared_prefix": True}, "rollout.engine.options.shared_prefix: samples branch where a window begins"),
        ({"sigma_max": 0.01}, "rollout.engine.options.sigma_min: 0.01 is not below sigma_max"),
        ({"sampling": {"temperature": 0.5}}, "rollout.sampling.temperature: 0.5; a denoised sample has no"),
        ({"temperatures": {"policy.temperature": 0.5}}, "policy.temperature: 0.5; a denoised sample has no"),
        ({"sampling": {"top_k": 3}}, "rollout.sampling.top_p, top_k: 1 and 3; noise is not cut"),
        ({"sampling": {"top_p": 0.9}}, "rollout.sampling.top_p, top_k: 0.9 and 0; noise is not cut"),
        ({"sampling": {"max_units": 1001}}, "rollout.sampling.max_units: 1001 denoising steps; give 1 to 1000"),
        ({"sampling": {"max_units": 1}}, "rollout.sampling.max_units: of 1 steps none is noisy, so that nothing is"),
        (
            {"sampler": "cps", "trained": "even", "sampling": {"max_units": 1}},
            "rollout.sampling.max_units: of 1 steps none is noisy, so that nothing is decided; give 2 or more",
        ),
        (
            {"sampler": "edm", "sampling": {"max_units": 2}},
            "rollout.sampling.max_units: of 2 steps none is noisy, so that nothing is decided; give 3 or more",
        ),
        (
            {"trained": "window", "window": 4, "window_start": 6},
            "rollout.sampling.max_units: of 10 steps, no window of 4 fits from step 6 on among",
        ),
        (
            {"trained": "window", "window": 4, "window_stop": 3},
            "rollout.sampling.max_units: of 10 steps, no window of 4 fits from step 0 on and before step 3 among",
        ),
        (
            {"sampler": "edm", "trained": "window", "window": 2, "window_start": 7},
            "rollout.sampling.max_units: of 10 steps, no window of 2 fits from step 7 on among",
        ),
        (
            {"evaluation": {"evaluation": Sampling(temperature=0.0, max_units=5000)}},
            "evaluation.max_units: 5000 denoising steps",
        ),
    ]:
        (problem,) = told(**asked)
        assert problem.startswith(said)


def test_it_says_which_decisions_it_makes():
    for options, kind, most in [
        ({}, "transitions", 9),
        ({"trained": "even"}, "transitions", 5),
        ({"trained": "window", "window": 3}, "transitions", 3),
        ({"sampler": "unipc", "regressions": 4}, "regressions", 4),
    ]:
        found = said_before(**options)
        assert (found.decisions, found.decisions_key) == (kind, "rollout.engine.options.regressions")
        assert found.most_decisions == most
