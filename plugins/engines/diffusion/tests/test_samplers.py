"""Each sampler against the formulas of its paper, written out by themselves in float64."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest

from cosmos_engine_diffusion.multistep import Edm, UniPc
from cosmos_engine_diffusion.samplers import Cps, Euler, FlowSde, karras, shifted

spec = importlib.util.spec_from_file_location("diffusion_courses", Path(__file__).with_name("discretizations.py"))
discretizations = importlib.util.module_from_spec(spec)
spec.loader.exec_module(discretizations)
follow, curved, Gaussian = discretizations.follow, discretizations.curved, discretizations.Gaussian

STATE = np.random.default_rng(0).normal(size=(3, 2, 4, 4))
NOISES = np.random.default_rng(1).normal(size=(64, 3, 2, 4, 4))


def times_of(discretization):
    return [step.time for step in discretization.steps]


def test_times_are_evenly_spaced_and_then_moved_towards_noise():
    assert shifted(4, 1.0) == [1.0, 0.75, 0.5, 0.25]
    assert shifted(4, 3.0) == pytest.approx([1.0, 0.9, 0.75, 0.5])


def test_karras_times_are_those_of_edm():
    sigmas = [time / (1 - time) for time in karras(5, 200.0, 0.01)]
    wanted = [(200 ** (1 / 7) + i / 4 * (0.01 ** (1 / 7) - 200 ** (1 / 7))) ** 7 for i in range(5)]
    assert sigmas == pytest.approx(wanted)


def test_euler_follows_the_velocity():
    for number in [1, 2, 7]:
        times, state = [*shifted(number, 3.0), 0.0], STATE
        for index in range(number):
            state = state + (times[index + 1] - times[index]) * curved(state, times[index])
        found = follow(Euler(shift=3.0).discretize(number, ()), STATE, curved)[-1]
        np.testing.assert_allclose(found, state, rtol=1e-12, atol=1e-12)


def sde_by_the_paper(number, noisy, level):
    """mean = x + (v + s²/2t (x + (1 - t) v)) dt."""
    times, state = [*shifted(number, 3.0), 0.0], STATE
    for index in range(number):
        time, dt = times[index], times[index + 1] - times[index]
        velocity = curved(state, time)
        if index not in noisy:
            state = state + velocity * dt
            continue
        sigma = level * math.sqrt(time / (1 - (times[1] if time == 1.0 else time)))
        drift = velocity + sigma**2 / (2 * time) * (state + (1 - time) * velocity)
        state = state + drift * dt + sigma * math.sqrt(-dt) * NOISES[index]
    return state


def test_the_sde_is_that_of_the_paper():
    for noisy in [range(7), (0,), (2, 3)]:
        discretization = FlowSde(shift=3.0, noise_level=0.7).discretize(8, frozenset(noisy))
        found = follow(discretization, STATE, curved, lambda index: NOISES[index])[-1]
        np.testing.assert_allclose(found, sde_by_the_paper(8, noisy, 0.7), rtol=1e-12, atol=1e-12)


def test_the_first_step_adds_no_more_noise_than_there_is():
    first = FlowSde(shift=3.0, noise_level=0.7).discretize(8, frozenset(range(7))).steps[0]
    assert first.std == pytest.approx(0.7)


def test_cps_replaces_part_of_the_predicted_noise():
    for noisy in [range(7), (1, 2)]:
        times, state = [*shifted(8, 3.0), 0.0], STATE
        for index in range(8):
            time, following = times[index], times[index + 1]
            velocity = curved(state, time)
            if index not in noisy:
                state = state + velocity * (following - time)
                continue
            clean, noise = state - time * velocity, state + (1 - time) * velocity
            std = following * math.sin(0.6 * math.pi / 2)
            state = (1 - following) * clean + math.sqrt(following**2 - std**2) * noise + std * NOISES[index]
        discretization = Cps(shift=3.0, noise_level=0.6).discretize(8, frozenset(noisy))
        found = follow(discretization, STATE, curved, lambda index: NOISES[index])[-1]
        np.testing.assert_allclose(found, state, rtol=1e-12, atol=1e-12)


def edm_by_itself(number, churn, state):
    """The multistep of arXiv:2308.02157 in EDM's own terms, with churn at the begin of each step."""

    def clean(noisy, sigma):
        time = sigma / (1 + sigma)
        return noisy * (1 - time) - time * curved(noisy * (1 - time), time)

    def phi(order, value):
        return math.expm1(value) / value if order == 1 else (phi(order - 1, value) - 1) / value

    sigmas = [time / (1 - time) for time in karras(number, 80.0, 0.02)]
    noisy, known = state, None
    for index in range(number - 1):
        sigma = sigmas[index] * (1 + churn)
        if index and churn:
            noisy = noisy + math.sqrt(sigma**2 - sigmas[index] ** 2) * NOISES[index - 1]
        predicted = clean(noisy, sigma)
        length = math.log(sigma / sigmas[index + 1])
        first, second = phi(1, -length), phi(2, -length)
        if known is None:
            noisy = math.exp(-length) * noisy + length * first * predicted
        else:
            place = (-math.log(known[1]) + math.log(sigma)) / length
            mixed = (first - second / place) * predicted + second / place * known[0]
            noisy = math.exp(-length) * noisy + length * mixed
        known = (predicted, sigma)
    return clean(noisy, sigmas[-1])


def test_edm_is_the_multistep_on_predictions_of_the_sample():
    for churn in [0.0, 0.3]:
        noisy = frozenset(range(8)) if churn else frozenset()
        discretization = Edm(sigma_max=80.0, sigma_min=0.02, churn=churn).discretize(10, noisy)
        sigma = 80.0 * (1 + churn)
        found = follow(discretization, discretization.start * STATE, curved, lambda index: NOISES[index])[-1]
        np.testing.assert_allclose(found, edm_by_itself(10, churn, sigma * STATE), rtol=1e-9, atol=1e-9)


def test_edm_adds_no_noise_before_its_last_step():
    edm = Edm(sigma_max=80.0, sigma_min=0.02, churn=0.3)
    assert [edm.num_noisy(number) for number in (1, 2, 3, 20)] == [0, 0, 1, 18]
    steps = edm.discretize(6, frozenset(range(4))).steps
    assert [step.std > 0 for step in steps] == [True] * 4 + [False] * 2


def test_unipc_is_that_of_diffusers():
    for karras_sigmas in [False, True]:
        for number in [1, 2, 3, 6, 10]:
            diffusers = pytest.importorskip("diffusers")
            torch = pytest.importorskip("torch")
            scheduler = diffusers.UniPCMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
            )
            sampler = UniPc(shift=3.0, sigmas=(200.0, 0.01) if karras_sigmas else None)
            discretization = sampler.discretize(number, ())
            scheduler.set_timesteps(number)
            if karras_sigmas:
                scheduler.sigmas = torch.tensor([*times_of(discretization), 0.0])
            assert times_of(discretization) == pytest.approx(scheduler.sigmas[:-1].tolist(), abs=1e-6)
            state = torch.tensor(STATE)
            for step, sigma in zip(scheduler.timesteps, scheduler.sigmas, strict=False):
                scheduler._step_index = None if sigma == scheduler.sigmas[0] else scheduler._step_index
                velocity = torch.tensor(curved(state.numpy(), float(sigma)))
                state = scheduler.step(velocity, step, state).prev_sample
            # Its noise levels are float32.
            np.testing.assert_allclose(follow(discretization, STATE, curved)[-1], state.numpy(), rtol=1e-5, atol=1e-5)


def error(ends, wanted):
    return max(abs(ends[0] - wanted[0]), abs(ends[1] - wanted[1]) / wanted[1])


def test_the_sde_has_the_marginals_of_the_ode():
    """Data that is normal: every marginal of the flow is known, and what steps lead to can be computed exactly."""
    for level in [0.3, 0.7, 1.0]:
        data, wanted = Gaussian(), (0.8, 0.3**2)
        for number, most in ((100, 0.1), (400, 0.03), (1600, 0.01)):
            sde = FlowSde(shift=1.0, noise_level=level).discretize(number, frozenset(range(number - 1)))
            ode = Euler(shift=1.0).discretize(number, ())
            assert error(data.ends(sde), wanted) < most
            assert error(data.ends(ode), wanted) < most


def test_marginals_on_the_way_are_those_of_the_flow():
    """But for the first step, whose variance is a^4 / 4 too large where it begins at 1; that fades."""
    data, number = Gaussian(), 2000
    sde = FlowSde(shift=1.0, noise_level=0.7).discretize(number, frozenset(range(number - 1)))
    variance = 1.0
    assert sde.steps[0].of_state ** 2 + sde.steps[0].std ** 2 == pytest.approx(1 + 0.7**4 / 4, rel=1e-3)
    for index, step in enumerate(sde.steps[:-1]):
        a, b = step.of_state, step.of_velocity
        variance = (a + b * data.slope(step.time)) ** 2 * variance + step.std**2
        if index % 250 == 249:
            assert variance == pytest.approx(data.marginal(sde.steps[index + 1].time)[1], rel=0.015)


def test_cps_does_not_keep_the_variance_of_data():
    """It keeps how much noise there is, not the marginals: part of what it takes for noise is data."""
    data = Gaussian(std=1.0)
    cps = Cps(shift=1.0, noise_level=0.7).discretize(1600, frozenset(range(1599)))
    assert error(data.ends(cps), (0.8, 1.0)) > 0.05


def test_samplers_of_higher_order_need_fewer_steps():
    truth = follow(Euler(shift=1.0).discretize(20_000, ()), STATE[0, 0], curved)[-1]
    apart = {
        "euler": np.abs(follow(Euler(shift=1.0).discretize(20, ()), STATE[0, 0], curved)[-1] - truth).max(),
        "unipc": np.abs(follow(UniPc(shift=1.0).discretize(20, ()), STATE[0, 0], curved)[-1] - truth).max(),
    }
    assert apart["unipc"] < 0.2 * apart["euler"]


def test_the_divergence_of_two_velocities_is_that_of_their_normals():
    """b² (v - v')² / (2 std²), by Monte Carlo, and for the SDE as FlowGRPO writes it."""
    for sampler in [FlowSde(shift=3.0, noise_level=0.7), Cps(shift=3.0, noise_level=0.7)]:
        step = sampler.discretize(8, frozenset(range(7))).steps[3]
        ours, theirs, state = 0.4, 0.1, 0.7
        closed = step.of_velocity**2 * (ours - theirs) ** 2 / (2 * step.std**2)
        means = [step.of_state * state + step.of_velocity * each for each in (ours, theirs)]
        drawn = means[0] + step.std * np.random.default_rng(0).normal(size=400_000)
        ratios = ((drawn - means[1]) ** 2 - (drawn - means[0]) ** 2) / (2 * step.std**2)
        assert closed == pytest.approx(ratios.mean(), abs=5 * ratios.std() / math.sqrt(len(ratios)))
        if isinstance(sampler, FlowSde):
            time, following = shifted(8, 3.0)[3:5]
            sigma = 0.7 * math.sqrt(time / (1 - time))
            factor = 1 / sigma + sigma * (1 - time) / (2 * time)
            assert closed == pytest.approx((time - following) / 2 * factor**2 * (ours - theirs) ** 2)
