"""What is said of decisions, against numbers worked by hand and other implementations."""

import math

import pytest
import torch

from cosmos_core.errors import TrainingError
from cosmos_core.models.diffusion.packing import VELOCITY, Decisions
from cosmos_core.protocols.frozen import Blend, Divergence, KLTarget

SHAPE = (2, 3, 2, 2)


def decisions(*, is_regression=(False, True), given=(), seed=0):
    drawn = torch.Generator().manual_seed(seed)
    is_given = torch.zeros(2, 3, dtype=torch.bool)
    is_given[:, list(given)] = True
    return Decisions(
        {
            "latents": torch.randn((2, *SHAPE), generator=drawn),
            "targets": torch.randn((2, *SHAPE), generator=drawn),
            "times": torch.tensor([0.7, 0.4]),
            "steps": torch.tensor([[0.9, -0.3, 0.5], [0.0, 1.0, 1.0]]),
            "is_regression": torch.tensor(is_regression),
            "is_given": is_given,
        }
    )


def ask(known, velocity, comparison=None, other=None, **asked):
    kl_target = None if comparison is None else KLTarget(prediction=other, comparison=comparison)
    return known.decide(velocity, kl_target=kl_target, **asked)


def test_a_transition_has_the_density_of_what_is_decided(subtests):
    for given in [(), (0,), (0, 2)]:
        with subtests.test(given=given):
            known, velocity = decisions(given=given), torch.randn(2, *SHAPE)
            free = [frame for frame in range(3) if frame not in given]
            mean = 0.9 * known.latents_N[0] - 0.3 * velocity[0]
            expected = torch.distributions.Normal(mean, 0.5).log_prob(known.targets_N[0])[:, free].mean()
            torch.testing.assert_close(ask(known, velocity).logprobs_N[0], expected)


def test_a_regression_is_its_squared_error():
    # v = 0 everywhere, e - x0 = 2 everywhere but in the given frame, where it is 9: the error is 4.
    known = decisions(given=(1,))
    known.targets_N[1] = 2.0
    known.targets_N[1, :, 1] = 9.0
    assert float(ask(known, torch.zeros(2, *SHAPE)).logprobs_N[1]) == pytest.approx(-4.0)


def test_the_entropy_is_that_of_one_dim():
    found = ask(decisions(), torch.zeros(2, *SHAPE), with_entropy=True).entropy_N
    expected = [0.5 * math.log(2 * math.pi * math.e * 0.25), 0.5 * math.log(2 * math.pi * math.e * 0.5)]
    assert found.tolist() == pytest.approx(expected)


def test_the_divergence_is_that_of_normals(subtests):
    for kind in ["forward-kl", "reverse-kl"]:
        with subtests.test(kind=kind):
            known, ours, theirs = decisions(), torch.randn(2, *SHAPE), torch.randn(2, *SHAPE)
            other = ask(known, theirs, prediction_for=Divergence(kind=kind)).prediction
            found = ask(known, ours, comparison=Divergence(kind=kind), other=other).divergence_N
            for index, (b, std) in enumerate(((-0.3, 0.5), (1.0, math.sqrt(0.5)))):
                p = torch.distributions.Normal(b * ours[index], std)
                q = torch.distributions.Normal(b * theirs[index], std)
                torch.testing.assert_close(found[index], torch.distributions.kl_divergence(p, q).mean())

    """Against Monte Carlo: the mean of log p - log q under p, of one dim."""
    known = decisions()
    ours, theirs = torch.full((2, *SHAPE), 0.8), torch.full((2, *SHAPE), -0.5)
    other = {VELOCITY: theirs}
    found = ask(known, ours, comparison=Divergence(kind="reverse-kl"), other=other).divergence_N[0]
    p, q = torch.distributions.Normal(-0.3 * 0.8, 0.5), torch.distributions.Normal(0.3 * 0.5, 0.5)
    drawn = torch.randn(400_000, generator=torch.Generator().manual_seed(0)) * 0.5 - 0.24
    assert float(found) == pytest.approx(float((p.log_prob(drawn) - q.log_prob(drawn)).mean()), abs=3e-3)


def test_blends_are_errors_of_samples():
    known = decisions(is_regression=(True, True), given=(2,))
    ours, theirs = torch.randn(2, *SHAPE, requires_grad=True), torch.randn(2, *SHAPE)
    found = ask(known, ours, comparison=Blend(shares=(1.0, -0.5)), other={VELOCITY: theirs}).blended
    for place, share in enumerate((1.0, -0.5)):
        blend = share * ours + (1 - share) * theirs
        time = known.times_N[:, None, None, None, None]
        sample = known.latents_N - time * known.targets_N
        error = (known.latents_N - time * blend - sample)[:, :, :2]
        torch.testing.assert_close(found.squared_NK[:, place], (error**2).mean((1, 2, 3, 4)), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.absolute_NK[:, place], error.abs().mean((1, 2, 3, 4)), rtol=1e-5, atol=1e-6)
    assert found.squared_NK.requires_grad
    assert not found.absolute_NK.requires_grad

    velocity = torch.zeros(2, *SHAPE)
    with pytest.raises(TrainingError, match="a micro-batch has transitions"):
        ask(decisions(), velocity, comparison=Blend(shares=(1.0,)), other={VELOCITY: velocity})


def test_what_a_whole_step_keeps_is_moved_to_the_cpu(monkeypatch):
    """Indexing tensors of a device that is not there fails, so the move itself is watched."""
    moved = []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: moved.append(self.shape) or self.clone())
    velocity, comparison = torch.randn(2, *SHAPE, requires_grad=True), Divergence(kind="reverse-kl")
    kept = ask(decisions(), velocity, prediction_for=comparison).prediction[VELOCITY]
    assert moved == [velocity.shape]
    assert not kept.requires_grad
    torch.testing.assert_close(kept, velocity.detach())
