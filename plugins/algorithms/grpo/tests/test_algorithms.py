"""GRPO, Dr. GRPO and DAPO as the core uses them: options in, advantages and losses out."""

import math
import subprocess
import sys

import attrs
import pytest
import torch

from cosmos_algorithm_grpo import Dapo, DapoOptions, DrGrpo, DrGrpoOptions, Grpo, GrpoOptions, dapo, dr_grpo, grpo
from cosmos_algorithm_grpo.overlong import length_reward
from cosmos_core.errors import ConfigError
from cosmos_core.protocols import Aggregation, AlgorithmContext, Decisions
from cosmos_core.types import Group, Sample, SampleStatus

CONTEXT = AlgorithmContext(group_size=4, temperature=1.0, max_units=100, max_staleness=2)
ON_POLICY = attrs.evolve(CONTEXT, max_staleness=0)
ALL = [(Grpo, GrpoOptions), (DrGrpo, DrGrpoOptions), (Dapo, DapoOptions)]


def sample(index, reward, num_units=10, status=None):
    if status is None:
        status = SampleStatus.OK if reward is not None else SampleStatus.REWARD_FAILED
    return Sample(
        index=index,
        status=status,
        reward=reward,
        rewards={},
        oldest_version=0,
        newest_version=0,
        num_units=num_units,
        num_prompt_units=5,
    )


def group(*rewards, num_units=None):
    lengths = num_units or [10] * len(rewards)
    samples = tuple(sample(i, r, n) for i, (r, n) in enumerate(zip(rewards, lengths, strict=True)))
    return Group(position=0, samples=samples)


def decisions(logprobs, *, old, behaviour, advantages):
    logprobs_N = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    return Decisions(
        logprobs_N=logprobs_N,
        behaviour_logprobs_N=torch.tensor(behaviour, dtype=torch.float64),
        old_logprobs_N=torch.tensor(old, dtype=torch.float64),
        entropy_N=None,
        advantages_N=torch.tensor(advantages, dtype=torch.float64),
        sequence_N=torch.zeros(len(logprobs), dtype=torch.int64),
        num_sequences=1,
    )


def test_aggregations():
    assert Grpo(GrpoOptions(), CONTEXT).aggregation is Aggregation.SEQUENCE_MEAN_TOKEN_MEAN
    assert Grpo(GrpoOptions(aggregation="token-mean"), CONTEXT).aggregation is Aggregation.TOKEN_MEAN
    assert DrGrpo(DrGrpoOptions(), CONTEXT).aggregation is Aggregation.SEQUENCE_MEAN_TOKEN_SUM
    assert Dapo(DapoOptions(), CONTEXT).aggregation is Aggregation.TOKEN_MEAN


def test_constant_length_is_the_longest_completion_unless_given():
    assert DrGrpo(DrGrpoOptions(), CONTEXT).constant_length == 100
    assert DrGrpo(DrGrpoOptions(constant_length=64), CONTEXT).constant_length == 64


def test_advantages_of_each():
    groups = [group(1.0, 0.0, 0.0, 0.0), group(1.0, None, 0.0, 0.0)]
    assert Grpo(GrpoOptions(advantage_eps=0.0), CONTEXT).advantages(groups)[0] == [1.5, -0.5, -0.5, -0.5]
    assert DrGrpo(DrGrpoOptions(), CONTEXT).advantages(groups)[0] == [0.75, -0.25, -0.25, -0.25]
    for make, options in ALL:
        scored = [value for value in make(options(), CONTEXT).advantages(groups)[1] if value is not None]
        assert math.fsum(scored) == pytest.approx(0.0, abs=1e-12)


def test_groups_do_not_influence_one_another():
    for make, options in ALL:
        algorithm = make(options(), CONTEXT)
        alone = algorithm.advantages([group(1.0, 0.0)])
        assert algorithm.advantages([group(9.0, -9.0), group(1.0, 0.0)])[1:] == alone


def test_dapo_drops_groups_without_contrast_and_the_others_do_not():
    equal = group(1.0, 1.0, None, 1.0)
    assert Dapo(DapoOptions(), CONTEXT).admit(equal) == "equal rewards"
    assert Dapo(DapoOptions(dynamic_sampling=False), CONTEXT).admit(equal) is None
    assert Dapo(DapoOptions(), CONTEXT).admit(group(1.0, 0.0)) is None
    assert Grpo(GrpoOptions(), CONTEXT).admit(equal) is None
    assert DrGrpo(DrGrpoOptions(), CONTEXT).admit(equal) is None


def test_dapo_leaves_unscored_groups_to_the_core():
    assert Dapo(DapoOptions(), CONTEXT).admit(group(1.0, None, None)) is None


@pytest.mark.parametrize(("length", "expected"), [(0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0)])
def test_length_reward_by_hand(length, expected):
    assert length_reward(length, max_units=100, buffer_units=20) == expected
    assert length_reward(length, max_units=100, buffer_units=0) == 0.0


def test_dapo_shapes_rewards_by_length_before_the_statistics():
    algorithm = Dapo(DapoOptions(advantage_eps=0.0, overlong_penalty=0.5), CONTEXT)
    # 1 - 0.5 · 10 / 20, 0.25 and 0.25 - 0.5 · 10 / 20 are 0.75, 0.25, 0: mean 1/3, sample variance 0.291667 / 2
    shaped = algorithm.advantages([group(1.0, 0.25, 0.25, num_units=[90, 80, 90])])
    assert shaped == [pytest.approx([1.091089, -0.218218, -0.872872], abs=1e-6)]


def test_dapo_clips_asymmetrically():
    given = decisions([math.log(1.27), math.log(1.5)], old=[0.0, 0.0], behaviour=[0.0, 0.0], advantages=[1.0, 1.0])
    assert Dapo(DapoOptions(), CONTEXT).loss(given).loss_N.tolist() == pytest.approx([-1.27, -1.28])
    assert Grpo(GrpoOptions(), CONTEXT).loss(given).loss_N.tolist() == pytest.approx([-1.2, -1.2])


@pytest.mark.parametrize(("make", "options"), ALL)
def test_the_importance_weight_scales_the_gradient_and_carries_none(make, options):
    algorithm = make(options(old_logprobs="recompute", importance_cap=2.0), CONTEXT)
    given = decisions([0.0, 0.0], old=[0.0, 0.0], behaviour=[math.log(0.25), math.log(2.0)], advantages=[1.0, 1.0])
    priced = algorithm.loss(given)
    priced.loss_N.sum().backward()
    # ratio 1, weights min(4, 2) and 0.5: above the cap the gradient is there still
    assert given.logprobs_N.grad.tolist() == pytest.approx([-2.0, -0.5])
    assert priced.metrics["importance_weight"].tolist() == pytest.approx([2.0, 0.5])


@pytest.mark.parametrize(("make", "options"), ALL)
def test_a_token_outside_the_range_of_the_ratio_does_not_count(make, options):
    algorithm = make(options(old_logprobs="recompute", importance_cap=5.0, importance_floor=0.5), CONTEXT)
    behaviour = [math.log(0.1), math.log(4.0), math.log(0.5), 0.0]
    given = decisions([0.0] * 4, old=[0.0] * 4, behaviour=behaviour, advantages=[1.0] * 4)
    priced = algorithm.loss(given)
    priced.loss_N.sum().backward()
    # The ratios are 10, 1/4, 2 and 1.
    assert given.logprobs_N.grad.tolist() == pytest.approx([0.0, 0.0, -2.0, -1.0])
    assert priced.metrics["masked_tokens"].tolist() == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(("make", "options"), ALL)
def test_a_bad_sequence_that_is_far_off_policy_does_not_count(make, options):
    algorithm = make(options(sequence_limit=0.5), CONTEXT)
    given = decisions([-1.0, -1.0], old=[-0.2, -0.2], behaviour=[-0.2, -0.2], advantages=[-1.0, -1.0])
    priced = algorithm.loss(given)
    assert priced.loss_N.tolist() == [0.0, 0.0]
    assert priced.metrics["sequence_masked_tokens"].tolist() == [1.0, 1.0]
    good = decisions([-1.0, -1.0], old=[-0.2, -0.2], behaviour=[-0.2, -0.2], advantages=[1.0, 1.0])
    assert algorithm.loss(good).metrics["sequence_masked_tokens"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("cap", [None, 0.5])
def test_a_range_needs_an_upper_end(cap):
    with pytest.raises(ConfigError, match=r"importance_floor = 0\.5: it is the lower end"):
        Grpo(GrpoOptions(old_logprobs="recompute", importance_cap=cap, importance_floor=0.5), ON_POLICY)


@pytest.mark.parametrize(("make", "options"), ALL)
def test_corrections_that_do_nothing_are_refused(make, options):
    with pytest.raises(ConfigError, match=r"importance_cap = 2\.0: it needs old_logprobs = 'recompute'"):
        make(options(importance_cap=2.0), CONTEXT)
    with pytest.raises(ConfigError, match="samples up to 2 steps old would go uncorrected"):
        make(options(old_logprobs="recompute"), CONTEXT)
    assert make(options(old_logprobs="recompute"), ON_POLICY).old_logprobs == "recompute"


@pytest.mark.parametrize("bad", [{"clip_low": 0.0}, {"clip_high": -0.1}, {"dual_clip": 1.0}, {"importance_cap": 0.0}])
def test_options_out_of_bounds(bad):
    with pytest.raises(ValueError):
        GrpoOptions(**bad)


@pytest.mark.parametrize("module", [grpo, dr_grpo, dapo])
def test_a_baseline_needs_two_samples(module):
    assert module.cosmos_algorithm().capabilities.min_group_size == 2


def test_importing_them_imports_no_torch():
    code = "import cosmos_algorithm_grpo, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
