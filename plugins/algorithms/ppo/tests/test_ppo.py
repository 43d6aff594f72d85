"""Advantages, returns and loss against numbers worked by hand."""

import subprocess
import sys

import attrs
import pytest
import torch

from cosmos_algorithm_ppo import Ppo, PpoOptions, generalised_advantages
from cosmos_core.errors import ConfigError
from cosmos_core.protocols import AlgorithmContext, Decisions
from cosmos_core.protocols.algorithm import Taken, TurnTaken
from cosmos_core.types import Group, Sample, SampleStatus

CONTEXT = AlgorithmContext(group_size=1, temperature=1.0, max_units=10, max_staleness=0)


def taken(reward, values, *, place=0, logprobs=None, reference=None):
    values_n = torch.tensor(values, dtype=torch.float64)
    logprobs_n = torch.zeros_like(values_n) if logprobs is None else torch.tensor(logprobs, dtype=torch.float64)
    frozen = {} if reference is None else {"reference": torch.tensor(reference, dtype=torch.float64)}
    return Taken(place=place, advantage=reward, logprobs_n=logprobs_n, frozen_n=frozen, values_n=values_n)


def settle(algorithm, sequences):
    estimate = algorithm.settle({each.place: algorithm.summarise(each) for each in sequences})
    return [estimate(each) for each in sequences]


def test_generalised_advantages_by_hand():
    """Differences 0.25, 0.5, 0.25 (gamma 0.5), summed backward by gamma · lambda = 0.25."""
    rewards, values = [0.0, 0.0, 1.0], [0.0, 0.5, 0.75]
    # 0.5 · 0.5 - 0, 0.5 · 0.75 - 0.5, 1 - 0.75
    first, second, third = 0.25, -0.125, 0.25
    expected = [first + 0.25 * (second + 0.25 * third), second + 0.25 * third, third]
    assert generalised_advantages(rewards, values, gamma=0.5, lam=0.5) == pytest.approx(expected)


def test_generalised_advantages_are_the_papers_sum():
    gamma, lam = 0.9, 0.7
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        rewards, values = (torch.randn(9, generator=generator, dtype=torch.float64).tolist() for _ in range(2))
        after = [*values[1:], 0.0]
        deltas = [rewards[t] + gamma * after[t] - values[t] for t in range(9)]
        expected = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, 9)) for t in range(9)]
        assert generalised_advantages(rewards, values, gamma=gamma, lam=lam) == pytest.approx(expected), seed
    assert generalised_advantages([], [], gamma=gamma, lam=lam) == []


def test_with_lambda_one_a_return_is_the_reward_whatever_the_critic_says():
    algorithm = Ppo(PpoOptions(lam=1.0, whiten=False), CONTEXT)
    (estimate,) = settle(algorithm, [taken(2.0, [0.3, -5.0, 1.0])])
    assert estimate.targets_n.tolist() == pytest.approx([2.0] * 3)
    assert estimate.advantages_n.tolist() == pytest.approx([1.7, 7.0, 1.0])


def test_what_is_given_for_a_turn_counts_at_its_end():
    algorithm = Ppo(PpoOptions(lam=1.0, whiten=False), CONTEXT)
    turns = tuple(TurnTaken(num_decisions=number, reward=reward) for number, reward in ((2, 0.5), (1, 0.25)))
    (estimate,) = settle(algorithm, [attrs.evolve(taken(2.0, [0.0] * 3), turns=turns)])
    assert estimate.targets_n.tolist() == pytest.approx([2.0, 2.0, 1.5])


def test_advantages_are_whitened_over_all_decisions_of_the_batch():
    algorithm = Ppo(PpoOptions(lam=1.0), CONTEXT)
    estimates = settle(algorithm, [taken(1.0, [0.0]), taken(0.0, [0.0, 0.0], place=1), taken(5.0, [1.0], place=7)])
    raw = torch.tensor([1.0, 0.0, 0.0, 4.0], dtype=torch.float64)
    found = torch.cat([each.advantages_n for each in estimates])
    torch.testing.assert_close(found, (raw - raw.mean()) / raw.std())
    # Returns stay on the scale of rewards.
    assert estimates[2].targets_n.tolist() == [5.0]


def test_each_decision_pays_its_own_divergence():
    """With lambda 1, a decision's return is the reward minus its own divergence and those after it."""
    algorithm = Ppo(PpoOptions(lam=1.0, whiten=False, kl_weight=0.1), CONTEXT)
    sequence = taken(1.0, [0.0, 0.0], logprobs=[-1.0, -2.0], reference=[-1.5, -1.0])
    (estimate,) = settle(algorithm, [sequence])
    assert estimate.targets_n.tolist() == pytest.approx([1.0 - 0.1 * (0.5 - 1.0), 1.0 - 0.1 * -1.0])
    assert estimate.metrics["reference_kl"] == pytest.approx(-0.25)
    assert algorithm.consults == {"reference": None}
    assert Ppo(PpoOptions(), CONTEXT).consults == {}


def test_the_loss_and_its_gradients_by_hand():
    """Ratio 1.5 clipped to 1.2 for a positive advantage; half the squared error, weighed by 0.5."""
    logprobs_N = torch.tensor([1.5, 1.5], dtype=torch.float64).log().requires_grad_()
    values_N = torch.tensor([1.0, 3.0], dtype=torch.float64, requires_grad=True)
    decisions = Decisions(
        logprobs_N=logprobs_N,
        behaviour_logprobs_N=torch.zeros(2, dtype=torch.float64),
        old_logprobs_N=torch.zeros(2, dtype=torch.float64),
        entropy_N=None,
        advantages_N=torch.tensor([2.0, -2.0], dtype=torch.float64),
        sequence_N=torch.zeros(2, dtype=torch.int64),
        num_sequences=1,
        targets_N=torch.tensor([2.0, 2.0], dtype=torch.float64),
        values_N=values_N,
    )
    loss_N = Ppo(PpoOptions(), CONTEXT).loss(decisions).loss_N
    assert loss_N.tolist() == pytest.approx([-2.4 + 0.25, 3.0 + 0.25])
    by_logprobs, by_values = torch.autograd.grad(loss_N.sum(), (logprobs_N, values_N))
    assert by_logprobs.tolist() == pytest.approx([0.0, 3.0])
    assert by_values.tolist() == pytest.approx([-0.5, 0.5])


def test_rewards_that_are_no_numbers_are_dropped_and_unscored_samples_take_no_part():
    def sample(index, reward, status=SampleStatus.OK):
        return Sample(
            index=index,
            status=status,
            reward=reward,
            rewards={},
            oldest_version=0,
            newest_version=0,
            num_units=1,
            num_prompt_units=1,
        )

    algorithm = Ppo(PpoOptions(), CONTEXT)
    good = Group(position=0, samples=(sample(0, 0.0), sample(1, None, SampleStatus.REWARD_FAILED)))
    assert algorithm.admit(good) is None
    assert algorithm.advantages([good]) == [[0.0, None]]
    assert algorithm.admit(Group(position=0, samples=(sample(0, float("nan")),))) == "reward not finite"


def test_a_ratio_that_corrects_nothing_is_refused():
    for changes, why in (
        (
            {"max_staleness": 2},
            r"samples up to 2 steps old would go uncorrected; set old_logprobs = 'behaviour', or sync\.mode",
        ),
        ({"generates_average": True}, r"'behaviour', or policy\.average\.publish = false"),
    ):
        context = attrs.evolve(CONTEXT, **changes)
        with pytest.raises(ConfigError, match=r"^algorithm\.options\.old_logprobs = 'recompute': .*" + why):
            Ppo(PpoOptions(old_logprobs="recompute"), context)
        assert Ppo(PpoOptions(), context).old_logprobs == "behaviour"


@pytest.mark.nightly
def test_importing_it_imports_no_torch():
    code = "import cosmos_algorithm_ppo.plugin, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
