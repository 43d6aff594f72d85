"""Each objective against its formula over whole pairs, in float64, with gradients by autograd."""

import math
import subprocess
import sys

import attrs
import pytest
import torch
from torch.nn.functional import logsigmoid

from cosmos_algorithm_dpo import bco, dpo, ipo
from cosmos_core.protocols import AlgorithmContext, Decisions
from cosmos_core.protocols.algorithm import Taken
from cosmos_core.protocols.frozen import FrozenOutput

CONTEXT = AlgorithmContext(group_size=2, temperature=1.0, max_units=10, max_staleness=0)
LENGTHS = (3, 5, 1, 4, 6, 2)
"""Of three pairs: chosen, rejected, chosen, …"""
BETA = 0.3


def of_dpo(chosen, rejected, smoothing=0.0):
    h = BETA * (chosen - rejected)
    return -(1 - smoothing) * logsigmoid(h) - smoothing * logsigmoid(-h)


def of_ipo(chosen, rejected):
    return (chosen - rejected - 1 / (2 * BETA)).square()


def of_bco(chosen, rejected):
    shift = BETA * torch.cat([chosen, rejected]).mean().detach()
    return -logsigmoid(BETA * chosen - shift) - logsigmoid(-(BETA * rejected - shift))


CASES = {
    "dpo": (dpo.make(dpo.DpoOptions(beta=BETA), CONTEXT), of_dpo),
    "smoothed": (
        dpo.make(dpo.DpoOptions(beta=BETA, label_smoothing=0.2), CONTEXT),
        lambda chosen, rejected: of_dpo(chosen, rejected, 0.2),
    ),
    "ipo": (ipo.make(ipo.IpoOptions(beta=BETA), CONTEXT), of_ipo),
    "bco": (bco.make(bco.BcoOptions(beta=BETA), CONTEXT), of_bco),
}


def drawn(scale=1.0):
    generator = torch.Generator().manual_seed(3)
    ours = [-scale * torch.rand(n, generator=generator, dtype=torch.float64) for n in LENGTHS]
    theirs = [-scale * torch.rand(n, generator=generator, dtype=torch.float64) for n in LENGTHS]
    return [each.requires_grad_() for each in ours], theirs


def taken_of(ours, theirs):
    return [
        Taken(
            place=place,
            advantage=-1.0 if place % 2 else 1.0,
            logprobs_n=own.detach(),
            frozen_n={"reference": other},
        )
        for place, (own, other) in enumerate(zip(ours, theirs, strict=True))
    ]


def settle(objective, taken):
    estimate = objective.settle({each.place: objective.summarise(each) for each in taken})
    return [estimate(each) for each in taken]


def total_of(objective, ours, theirs, estimates):
    """As the trainer does: the mean over sequences of sums over decisions, in two micro-batches."""
    total = torch.zeros((), dtype=torch.float64)
    for part in ([0, 3, 4], [1, 2, 5]):
        decisions = Decisions(
            logprobs_N=torch.cat([ours[i] for i in part]),
            behaviour_logprobs_N=torch.zeros(sum(LENGTHS[i] for i in part), dtype=torch.float64),
            old_logprobs_N=torch.cat([ours[i].detach() for i in part]),
            entropy_N=None,
            advantages_N=torch.cat([estimates[i].advantages_n for i in part]),
            sequence_N=torch.repeat_interleave(torch.arange(3), torch.tensor([LENGTHS[i] for i in part])),
            num_sequences=3,
            frozen={"reference": FrozenOutput(logprobs_N=torch.cat([theirs[i] for i in part]))},
            targets_N=torch.cat([estimates[i].targets_n for i in part]),
        )
        total = total + objective.loss(decisions).loss_N.sum() / len(LENGTHS)
    return total


def test_loss_and_gradient_are_those_of_the_papers_formula_over_pairs():
    ours, theirs = drawn()
    for name, (objective, formula) in CASES.items():
        total = total_of(objective, ours, theirs, settle(objective, taken_of(ours, theirs)))
        found = torch.autograd.grad(total, ours)
        ratios = torch.stack([(own - other).sum() for own, other in zip(ours, theirs, strict=True)])
        right = formula(ratios[::2], ratios[1::2]).mean()
        assert total.item() == pytest.approx(right.item(), rel=1e-12), name
        for mine, expected in zip(found, torch.autograd.grad(right, ours), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12, msg=name)


def test_dpo_by_hand():
    """One pair whose log-ratios are 1 and -1, beta 0.5: h = 1, loss -log sigmoid(1)."""
    objective = dpo.make(dpo.DpoOptions(beta=0.5), CONTEXT)
    zeros = torch.zeros(2, dtype=torch.float64)
    pair = [
        Taken(place=4, advantage=1.0, logprobs_n=zeros, frozen_n={"reference": zeros - 0.5}),
        Taken(place=5, advantage=-1.0, logprobs_n=zeros, frozen_n={"reference": zeros + 0.5}),
    ]
    chosen, rejected = settle(objective, pair)
    wrong = 1 / (1 + math.e)
    assert chosen.advantages_n.tolist() == pytest.approx([2 * 0.5 * wrong] * 2)
    assert rejected.advantages_n.tolist() == pytest.approx([-2 * 0.5 * wrong] * 2)
    assert chosen.targets_n.sum().item() == pytest.approx(math.log1p(math.exp(-1)))
    assert chosen.metrics == pytest.approx({"preference_accuracy": 1.0, "preference_margin": 1.0, "chosen_reward": 0.5})
    assert rejected.metrics == pytest.approx(
        {"preference_accuracy": 1.0, "preference_margin": 1.0, "rejected_reward": -0.5}
    )


def test_ipo_by_hand():
    """The loss is nothing where the log-ratios are 1 / (2 beta) apart."""
    objective = ipo.make(ipo.IpoOptions(beta=0.25), CONTEXT)
    zeros = torch.zeros(1, dtype=torch.float64)
    pair = [
        Taken(place=0, advantage=1.0, logprobs_n=zeros, frozen_n={"reference": zeros - 1.5}),
        Taken(place=1, advantage=-1.0, logprobs_n=zeros, frozen_n={"reference": zeros + 0.5}),
    ]
    for estimate in settle(objective, pair):
        assert (estimate.advantages_n.item(), estimate.targets_n.item()) == (0.0, 0.0)


def test_a_tie_is_half_right():
    objective = dpo.make(dpo.DpoOptions(), CONTEXT)
    ours, _ = drawn()
    estimates = settle(objective, taken_of(ours, [each.detach() for each in ours]))
    assert {estimate.metrics["preference_accuracy"] for estimate in estimates} == {0.5}


def test_far_from_the_reference_nothing_overflows():
    ours, theirs = drawn(scale=1e4)
    for name, (objective, _) in CASES.items():
        for pair in ((ours, theirs), (theirs, ours)):
            taken = taken_of(*pair)
            taken = [attrs.evolve(each, frozen_n={"reference": each.frozen_n["reference"].detach()}) for each in taken]
            for estimate in settle(objective, taken):
                assert estimate.advantages_n.isfinite().all(), name
                assert estimate.targets_n.isfinite().all(), name


@pytest.mark.nightly
def test_importing_them_imports_no_torch():
    names = ", ".join(f"cosmos_algorithm_dpo.{module}" for module in ("dpo", "ipo", "bco"))
    code = f"import {names}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
