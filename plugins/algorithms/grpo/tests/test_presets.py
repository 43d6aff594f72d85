"""Each preset against the formula of its paper, written with loops in float64; and with each correction."""

import itertools
import math
import subprocess
import sys

import attrs
import pytest
import torch

from cosmos_algorithm_grpo.overlong import length_reward
from cosmos_core.errors import ConfigError
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.policy.batches.batch import Counts
from cosmos_core.policy.training.microbatch import decision_weights
from cosmos_core.protocols import Aggregation, AlgorithmContext, Decisions
from cosmos_core.protocols.frozen import FrozenOutput
from cosmos_core.types import Group, Sample, SampleStatus

CONTEXT = AlgorithmContext(group_size=4, temperature=1.0, max_units=100, max_staleness=2)
PRESETS = ("grpo", "dr-grpo", "dapo", "gspo", "cispo", "rloo", "reinforce-plus-plus")
CORRECTIONS = {
    "none": {},
    "truncated": {"old_logprobs": "recompute", "importance_cap": 1.1},
    "masked": {"old_logprobs": "recompute", "importance_cap": 1.2, "importance_floor": 0.8},
    "sequences": {"sequence_limit": 0.05},
    "divergence": {"kl_weight": 0.3, "kl_place": "loss", "kl_estimator": "k3"},
    "divergence-k2": {"kl_weight": 0.3, "kl_place": "loss", "kl_estimator": "k2"},
}


@pytest.fixture(scope="module")
def make():
    plugins = PluginSet.load([("algorithm", name) for name in PRESETS])

    def create(name, context=CONTEXT, **options):
        return plugins.create("algorithm", name, options, context)

    create.plugins = plugins
    return create


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


@attrs.frozen
class Case:
    """Sequences of three lengths, off-policy; everything float64."""

    logprobs: torch.Tensor
    behaviour: torch.Tensor
    start: torch.Tensor
    reference: torch.Tensor
    lengths: tuple[int, ...] = (4, 1, 3)
    advantages: tuple[float, ...] = (1.0, -0.5, -1.5)

    @classmethod
    def draw(cls):
        generator = torch.Generator().manual_seed(3)

        def noise(scale):
            return scale * torch.randn(8, dtype=torch.float64, generator=generator)

        logprobs = (-1.0 + noise(0.5)).requires_grad_()
        behaviour = logprobs.detach() + noise(0.3)
        return cls(logprobs, behaviour, behaviour + noise(0.2), logprobs.detach() + noise(0.5))

    def decisions(self, algorithm):
        numbers = torch.tensor(self.lengths)
        return Decisions(
            logprobs_N=self.logprobs,
            behaviour_logprobs_N=self.behaviour,
            old_logprobs_N=self.start if algorithm.old_logprobs == "recompute" else self.behaviour,
            entropy_N=None,
            advantages_N=torch.tensor(self.advantages, dtype=torch.float64).repeat_interleave(numbers),
            sequence_N=torch.arange(len(numbers)).repeat_interleave(numbers),
            num_sequences=len(numbers),
            frozen={"reference": FrozenOutput(logprobs_N=self.reference)},
        )

    def sequences(self):
        """(places, advantage) of each sequence."""
        ends = list(itertools.accumulate(self.lengths))
        starts = [0, *ends[:-1]]
        return list(zip(map(slice, starts, ends), self.advantages, strict=True))

    def total(self, algorithm):
        """The step's loss, as the trainer weighs it."""
        priced = algorithm.loss(self.decisions(algorithm))
        totals = Counts(sequences=len(self.lengths), decisions=sum(self.lengths))
        weights = decision_weights(algorithm.aggregation, algorithm.constant_length, self.lengths, totals)
        weights_N = torch.tensor(weights, dtype=torch.float64).repeat_interleave(torch.tensor(self.lengths))
        return (priced.loss_N * weights_N).sum()


def surrogates(name, current, old, advantage):
    """The term of each token of one sequence, to be maximised."""
    ratio = (current - old).exp()
    if name == "gspo":
        # The token form, equation 14, without which a token's weight would be spread over its sequence.
        s = (current - old).mean().exp().detach() * (current - current.detach()).exp()
        return torch.min(s * advantage, s.clamp(1 - 3e-4, 1 + 4e-4) * advantage)
    if name in ("cispo", "rloo"):
        return ratio.detach().clamp(max={"cispo": 5.0, "rloo": 2.0}[name]) * advantage * current
    high = 0.28 if name == "dapo" else 0.2
    return torch.min(ratio * advantage, ratio.clamp(1 - 0.2, 1 + high) * advantage)


def papers_loss(name, case, correction):
    old = case.start if correction.get("old_logprobs") == "recompute" else case.behaviour
    terms = []
    for places, advantage in case.sequences():
        terms_n = surrogates(name, case.logprobs[places], old[places], advantage)
        weight_n = (case.start - case.behaviour)[places].exp()
        if "importance_floor" in correction:
            terms_n = terms_n * torch.where((weight_n < 0.8) | (weight_n > 1.2), 0.0, weight_n)
        elif "importance_cap" in correction:
            terms_n = terms_n * weight_n.clamp(max=1.1)
        if "sequence_limit" in correction and advantage < 0:
            terms_n = terms_n * float((case.behaviour - case.logprobs.detach())[places].mean() <= 0.05)
        if "kl_weight" in correction:
            d = (case.reference - case.logprobs)[places]
            terms_n = terms_n - 0.3 * (d.square() / 2 if correction["kl_estimator"] == "k2" else d.exp() - d - 1)
        terms.append(terms_n)
    if name in ("grpo", "gspo"):
        return -sum(term.mean() for term in terms) / len(terms)
    if name in ("dr-grpo", "rloo"):
        return -sum(term.sum() for term in terms) / len(terms) / CONTEXT.max_units
    return -torch.cat(terms).sum() / sum(case.lengths)


def test_the_loss_and_its_gradient_are_those_of_the_paper(make):
    case = Case.draw()
    for name, (correction, options) in itertools.product(PRESETS, CORRECTIONS.items()):
        ours, papers = case.total(make(name, **options)), papers_loss(name, case, options)
        assert ours.item() == pytest.approx(papers.item(), rel=1e-12), (name, correction)
        (our_gradient,) = torch.autograd.grad(ours, case.logprobs)
        (papers_gradient,) = torch.autograd.grad(papers, case.logprobs)
        assert torch.allclose(our_gradient, papers_gradient, rtol=1e-10, atol=1e-14), (name, correction)


def test_the_cases_above_reach_bounds_and_masks(make):
    """Else they would not tell a bound from none."""
    case = Case.draw()

    def metrics(name, **options):
        algorithm = make(name, **options)
        return algorithm.loss(case.decisions(algorithm)).metrics

    for name in ("grpo", "dapo", "gspo"):
        assert 0 < metrics(name)["clip_fraction"].sum() < 8
    assert metrics("rloo")["clip_fraction"].sum() == 0
    assert 0 < metrics("rloo", weight_cap=1.05)["clip_fraction"].sum() < 8
    masked = metrics("grpo", **CORRECTIONS["masked"])["masked_tokens"].sum()
    assert 0 < masked < 8
    assert (metrics("grpo", **CORRECTIONS["truncated"])["importance_weight"] == 1.1).any()
    assert 0 < metrics("grpo", **CORRECTIONS["sequences"])["sequence_masked_tokens"].sum() < 8


def test_without_drift_every_correction_is_none(make):
    case = Case.draw()
    flat = case.logprobs.detach()
    case = attrs.evolve(case, behaviour=flat, start=flat)
    for name in PRESETS:
        (expected,) = torch.autograd.grad(case.total(make(name)), case.logprobs)
        for correction in ("truncated", "masked", "sequences"):
            (found,) = torch.autograd.grad(case.total(make(name, **CORRECTIONS[correction])), case.logprobs)
            assert torch.allclose(found, expected, rtol=1e-7, atol=1e-7), (name, correction)


def test_advantages_of_each(make):
    groups = [group(1.0, 0.0, 0.0, 0.0), group(1.0, None, 0.0, 0.0)]
    expected = {
        "grpo": [1.5, -0.5, -0.5, -0.5],
        "dapo": [1.5, -0.5, -0.5, -0.5],
        "gspo": [1.5, -0.5, -0.5, -0.5],
        "cispo": [1.5, -0.5, -0.5, -0.5],
        "dr-grpo": [0.75, -0.25, -0.25, -0.25],
        "rloo": [1.0, -1 / 3, -1 / 3, -1 / 3],
    }
    for name, values in expected.items():
        first, second = make(name, advantage_eps=0.0).advantages(groups)
        assert first == pytest.approx(values)
        assert second[1] is None
        assert math.fsum(value for value in second if value is not None) == pytest.approx(0.0, abs=1e-12)
    # Seven samples of as many decisions: mean 2/7, squares 2 - 4/7 = 10/7, sample variance of 70 decisions.
    std = math.sqrt(10 * (10 / 7) / 69)
    found = make("reinforce-plus-plus", advantage_eps=0.0).advantages(groups)
    assert found == [
        pytest.approx([5 / 7 / std, *[-2 / 7 / std] * 3]),
        [pytest.approx(5 / 7 / std), None, *[pytest.approx(-2 / 7 / std)] * 2],
    ]


def test_groups_do_not_influence_one_another_unless_the_batch_is_the_scale(make):
    for name in PRESETS:
        algorithm = make(name)
        alone = algorithm.advantages([group(1.0, 0.0)])
        assert (algorithm.advantages([group(9.0, -9.0), group(1.0, 0.0)])[1:] == alone) is (
            name != "reinforce-plus-plus"
        )


def test_the_baseline_variant_of_reinforce_plus_plus(make):
    algorithm = make("reinforce-plus-plus", baseline="group-mean", advantage_eps=0.0)
    # Centred 2, -2, 1, -1: mean 0, squares 10 of 4 · 10 decisions.
    std = math.sqrt(10 * 10 / 39)
    found = algorithm.advantages([group(9.0, 5.0), group(1.0, -1.0)])
    assert found == [pytest.approx([2 / std, -2 / std]), pytest.approx([1 / std, -1 / std])]


def test_aggregations(make):
    assert {name: make(name).aggregation for name in PRESETS} == {
        "grpo": Aggregation.SEQUENCE_MEAN_TOKEN_MEAN,
        "dr-grpo": Aggregation.SEQUENCE_MEAN_TOKEN_SUM,
        "dapo": Aggregation.TOKEN_MEAN,
        "gspo": Aggregation.SEQUENCE_MEAN_TOKEN_MEAN,
        "cispo": Aggregation.TOKEN_MEAN,
        "rloo": Aggregation.SEQUENCE_MEAN_TOKEN_SUM,
        "reinforce-plus-plus": Aggregation.TOKEN_MEAN,
    }
    assert make("dr-grpo").constant_length == 100
    assert make("dr-grpo", constant_length=64).constant_length == 64


def test_dapo_drops_groups_without_contrast_and_the_others_only_if_asked(make):
    equal = group(1.0, 1.0, None, 1.0)
    for name in PRESETS:
        assert make(name).admit(equal) == ("equal rewards" if name == "dapo" else None)
        assert make(name, dynamic_sampling=True).admit(equal) == "equal rewards"
        assert make(name, dynamic_sampling=False).admit(equal) is None
        assert make(name, dynamic_sampling=True).admit(group(1.0, 0.0)) is None


def test_a_reward_that_is_no_finite_number_drops_its_group(make):
    failed = attrs.evolve(sample(1, math.nan), status=SampleStatus.REWARD_FAILED)
    for name in PRESETS:
        for reward in (math.nan, math.inf, -math.inf):
            assert make(name).admit(group(1.0, reward, 0.0)) == "reward not finite"
        assert make(name).admit(Group(position=0, samples=(sample(0, 1.0), failed, sample(2, 0.0)))) is None


def test_groups_with_too_few_scores_are_left_to_the_core(make):
    """It knows `min_group_size`, drops them as unscored, and ends a run in which all are."""
    assert make("dapo").admit(group(1.0, None, None)) is None
    for name in PRESETS:
        smallest = make.plugins.provider("algorithm", name).capabilities.min_group_size
        assert smallest == (1 if name == "reinforce-plus-plus" else 2)
        assert make(name).admit(group(None, None)) is None
        assert make(name).advantages([group(None, 1.0), group(1.0, 0.0)])[0][0] is None


def test_dapo_shapes_rewards_by_length_before_the_statistics(make):
    for length, expected in ((0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0)):
        assert length_reward(length, max_units=100, buffer_units=20) == expected, length
        assert length_reward(length, max_units=100, buffer_units=0) == 0.0, length
    algorithm = make("dapo", advantage_eps=0.0, overlong_penalty=0.5)
    # 1 - 0.5 · 10 / 20, 0.25 and 0.25 - 0.5 · 10 / 20 are 0.75, 0.25, 0: mean 1/3, sample variance 0.291667 / 2
    shaped = algorithm.advantages([group(1.0, 0.25, 0.25, num_units=[90, 80, 90])])
    assert shaped == [pytest.approx([1.091089, -0.218218, -0.872872], abs=1e-6)]


def test_options_out_of_bounds(make):
    for bad in ({"clip_low": 0.0}, {"clip_high": -0.1}, {"dual_clip": 1.0}, {"importance_cap": 0.0}):
        with pytest.raises(ConfigError, match=f"algorithm.options.{next(iter(bad))}: must be"):
            make("grpo", **bad)


def test_importing_them_imports_no_torch():
    code = "import cosmos_algorithm_grpo, cosmos_algorithm_grpo.dapo, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
