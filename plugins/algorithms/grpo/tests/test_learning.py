"""Every preset learns: a table of logits on prompts with one right answer, through the trainer's own weighing.

Shape legend: P prompts, G samples of each, T decisions of a sequence, V choices of a decision.
"""

import pytest
import torch

from cosmos_core.plugins.selection import PluginSet
from cosmos_core.policy.batches.batch import Counts
from cosmos_core.policy.training.microbatch import decision_weights
from cosmos_core.protocols import AlgorithmContext, Decisions
from cosmos_core.protocols.algorithm import AdvantageEstimator, Taken
from cosmos_core.protocols.frozen import FrozenOutput
from cosmos_core.types import Group, Sample, SampleStatus

PRESETS = ("grpo", "dr-grpo", "dapo", "gspo", "cispo", "rloo", "reinforce-plus-plus")
P, G, T, V = 6, 8, 3, 4
CONTEXT = AlgorithmContext(group_size=G, temperature=1.0, max_units=8, max_staleness=2)
RIGHT_PT = torch.randint(V, (P, T), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def make():
    plugins = PluginSet.load([("algorithm", name) for name in PRESETS])
    return lambda name, **options: plugins.create("algorithm", name, options, CONTEXT)


class Table:
    """A policy whose weights of some steps ago generate."""

    def __init__(self, *, staleness, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.logits_PTV = torch.zeros(P, T, V, requires_grad=True)
        self.reference_PTV = self.logits_PTV.detach().clone()
        self.optimizer = torch.optim.Adam([self.logits_PTV], lr=0.1)
        self.past = [self.logits_PTV.detach().clone()] * (staleness + 1)

    def accuracy(self):
        """Mean probability of a right decision."""
        return self.logits_PTV.detach().softmax(-1).gather(-1, RIGHT_PT[..., None]).mean().item()

    def step(self, algorithm):
        behaviour_PTV = self.past[0]
        drawn = torch.multinomial(
            behaviour_PTV.softmax(-1).repeat_interleave(G, 0).flatten(0, 1), 1, generator=self.generator
        ).view(P, G, T)
        rewards_PG = (drawn == RIGHT_PT[:, None]).float().mean(-1)
        groups = [group(position, rewards) for position, rewards in enumerate(rewards_PG.tolist())]
        kept = [place for place, each in enumerate(groups) if algorithm.admit(each) is None]
        if kept:
            self._train(algorithm, groups, kept, drawn, behaviour_PTV)
        self.past = [*self.past[1:], self.logits_PTV.detach().clone()]

    def _train(self, algorithm, groups, kept, drawn_PGT, behaviour_PTV):
        advantages = [value for values in algorithm.advantages([groups[place] for place in kept]) for value in values]

        def taken(logits_PTV):
            logprobs_PGTV = logits_PTV.log_softmax(-1)[kept][:, None].expand(-1, G, -1, -1)
            return logprobs_PGTV.gather(-1, drawn_PGT[kept][..., None]).flatten()

        logprobs_N, behaviour_N, reference_N = map(taken, (self.logits_PTV, behaviour_PTV, self.reference_PTV))
        old_N = logprobs_N.detach() if algorithm.old_logprobs == "recompute" else behaviour_N
        advantages_N = torch.tensor(advantages).repeat_interleave(T)
        if isinstance(algorithm, AdvantageEstimator):
            advantages_N = estimated(algorithm, advantages, old_N, reference_N)
        number = len(kept) * G
        priced = algorithm.loss(
            Decisions(
                logprobs_N=logprobs_N,
                behaviour_logprobs_N=behaviour_N,
                old_logprobs_N=old_N,
                entropy_N=None,
                advantages_N=advantages_N,
                sequence_N=torch.arange(number).repeat_interleave(T),
                num_sequences=number,
                frozen={"reference": FrozenOutput(logprobs_N=reference_N)},
            )
        )
        totals = Counts(sequences=number, decisions=number * T)
        weights = decision_weights(algorithm.aggregation, algorithm.constant_length, [T] * number, totals)
        self.optimizer.zero_grad()
        (priced.loss_N * torch.tensor(weights).repeat_interleave(T)).sum().backward()
        self.optimizer.step()


def estimated(algorithm, advantages, old_N, reference_N):
    sequences = [
        Taken(place=place, advantage=advantage, logprobs_n=old_n, frozen_n={"reference": reference_n})
        for place, (advantage, old_n, reference_n) in enumerate(
            zip(advantages, old_N.split(T), reference_N.split(T), strict=True)
        )
    ]
    estimate = algorithm.settle({each.place: algorithm.summarise(each) for each in sequences})
    return torch.cat([estimate(each).advantages_n for each in sequences])


def group(position, rewards):
    samples = [
        Sample(
            index=index,
            status=SampleStatus.OK,
            reward=reward,
            rewards={},
            oldest_version=0,
            newest_version=0,
            num_units=T,
            num_prompt_units=1,
        )
        for index, reward in enumerate(rewards)
    ]
    return Group(position=position, samples=tuple(samples))


def learnt(algorithm, *, staleness=0, steps=50):
    torch.set_num_threads(1)
    table = Table(staleness=staleness)
    for _ in range(steps):
        table.step(algorithm)
    return table


def test_every_preset_learns(make):
    assert Table(staleness=0).accuracy() == pytest.approx(1 / V)
    for name in PRESETS:
        # So near are the bounds of `gspo` that most stale sequences are clipped.
        for staleness, least in ((0, 0.9), (2, 0.6)):
            assert learnt(make(name), staleness=staleness).accuracy() > least, (name, staleness)


@pytest.mark.nightly
def test_a_divergence_holds_the_policy_near_its_reference(make):
    for name, options in (
        ("grpo", {"kl_place": "loss", "kl_estimator": "k3"}),
        ("grpo", {"kl_place": "loss", "kl_estimator": "k2"}),
        ("rloo", {"kl_place": "reward", "kl_estimator": "k1"}),
        ("reinforce-plus-plus", {}),
    ):
        free, near, nearest = (distance(make(name, kl_weight=weight, **options)) for weight in (0.0, 1.0, 10.0))
        assert free > 1.1 * near > 1.5 * nearest, (name, options)
        assert nearest < 0.3, (name, options)


def distance(algorithm):
    """The divergence from its reference of a policy that learnt with it."""
    table = learnt(algorithm)
    logprobs_PTV = table.logits_PTV.detach().log_softmax(-1)
    return (logprobs_PTV.exp() * (logprobs_PTV - table.reference_PTV.log_softmax(-1))).sum(-1).mean().item()
