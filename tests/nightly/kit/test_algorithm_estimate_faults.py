"""Faults of algorithms that settle their advantages by log-probs, values and the rest of the batch."""

import textwrap

from tests.nightly.kit.faulty_algorithm import CONSULTING, LOSS, REINFORCE, AlgorithmFaults, algorithm

ESTIMATING = """
from cosmos_core.protocols.algorithm import Estimate

class Whitened(Algorithm):
    def shaped(self, taken):
        kl_n = (taken.logprobs_n - taken.frozen_n["reference"]).clamp(-20, 20)
        {shape}
        return taken.advantage - 0.1 * kl_n.flip(0).cumsum(0).flip(0)

    def summarise(self, taken):
        values_n = self.shaped(taken)
        {summarise}
        return [len(values_n), float(values_n.sum())]

    def settle(self, batch):
        mean = sum(total for _, total in batch.values()) / sum(number for number, _ in batch.values())
        {settle}

        def estimate(taken):
            {estimate}
            return Estimate(advantages_n=self.shaped(taken) - mean)

        return estimate
"""


def estimating(*, shape="", summarise="", settle="", estimate="", declared=CONSULTING, loss=LOSS):
    """An algorithm that takes a divergence off the reward and centres advantages over the batch."""
    inside = {"shape": shape, "summarise": summarise, "settle": settle}
    blocks = {name: textwrap.indent(code.strip(), " " * 8).lstrip() for name, code in inside.items()}
    blocks["estimate"] = textwrap.indent(estimate.strip(), " " * 12).lstrip()
    source = algorithm(declared=declared, loss=loss) + ESTIMATING.format(**blocks)
    return source.replace("Provider(create=Algorithm,", "Provider(create=Whitened,")


VALUING = CONSULTING + "; needs_critic = True"
VALUES_ALONE = 'old_logprobs = "none"; needs_critic = True'


CENTRED_LATE = """
asked.append(self.shaped(taken))
if len(asked) == len(batch):
    for each_n in asked:
        each_n -= mean
return Estimate(advantages_n=asked[-1])
"""


def targets(values):
    """What estimates these targets for the critic."""
    return f"return Estimate(advantages_n=self.shaped(taken), targets_n={values})"


SOUND = {
    "estimating": (estimating(), ""),
}
PLANTED = {
    "estimates-what-it-has-seen": (
        estimating(
            summarise="self.seen += float(values_n.sum())",
            estimate="return Estimate(advantages_n=self.shaped(taken) - self.seen)",
        ),
        "test_an_estimate_depends_on_what_was_summarised_alone",
        "made in a process that has only the last two sequences, in another order, differ",
    ),
    "estimates-in-turn": (
        estimating(estimate="self.seen += 1\nreturn Estimate(advantages_n=self.shaped(taken) - self.seen)"),
        "test_an_estimate_depends_on_what_was_summarised_alone",
        "made in a process that has only the last two sequences, in another order, differ",
    ),
    "estimates-when-asked-for-all": (
        estimating(settle="asked = []", estimate=CENTRED_LATE),
        "test_an_estimate_depends_on_what_was_summarised_alone",
        "made in a process that has only the last two sequences, in another order, differ",
    ),
    "summarises-for-nothing": (
        estimating().replace("def settle(", "def resolve("),
        "test_declarations_mean_something",
        "has summarise, and lacks settle of `AdvantageEstimator`",
    ),
    "settles-nothing": (
        estimating().replace("def summarise(", "def summary("),
        "test_declarations_mean_something",
        "has settle, and lacks summarise of `AdvantageEstimator`",
    ),
    "settles-at-once": (
        estimating(settle="return [Estimate(advantages_n=torch.zeros(1)) for _ in batch]"),
        "test_every_decision_gets_a_price",
        "what it gave, which must be a function that gives an Estimate for a Taken, raised TypeError",
    ),
    "settles-without-return": (
        estimating(estimate="return None"),
        "test_every_decision_gets_a_price",
        "what it gave, which must be a function that gives an Estimate for a Taken, raised AttributeError",
    ),
    "settles-others-than-there-are": (
        estimating(settle="batch[len(batch)]"),
        "test_every_decision_gets_a_price",
        "raised KeyError: 6",
    ),
    "estimates-in-place": (
        estimating(shape="taken.logprobs_n.mul_(0.5)"),
        "test_an_estimate_depends_on_what_was_summarised_alone",
        "summarise or settle changed log-probs or values in place",
    ),
    "estimates-change-values": (
        estimating(shape="taken.values_n.mul_(0.5)", declared=VALUING),
        "test_an_estimate_depends_on_what_was_summarised_alone",
        "summarise or settle changed log-probs or values in place",
    ),
    "targets-what-it-has-seen": (
        estimating(summarise="self.seen += 1", estimate=targets("taken.values_n - self.seen"), declared=VALUING),
        "test_an_estimate_depends_on_what_was_summarised_alone",
        "made in a process that has only the last two sequences, in another order, differ",
    ),
    "targets-in-turn": (
        estimating(estimate="self.seen += 1\n" + targets("taken.values_n - self.seen"), declared=VALUING),
        "test_an_estimate_depends_on_what_was_summarised_alone",
        "made in a process that has only the last two sequences, in another order, differ",
    ),
    "targets-of-some": (
        estimating(estimate=targets("taken.values_n if taken.place else None"), declared=VALUING),
        "test_every_decision_gets_a_price",
        "gave targets_n for some sequences of the step and None for others",
    ),
    "estimates-longer-than-values": (
        estimating(
            estimate="return Estimate(advantages_n=torch.zeros(len(taken.values_n) + 1))",
            declared=VALUES_ALONE,
            loss=REINFORCE,
        ).replace("self.shaped(taken)", "taken.values_n"),
        "test_every_decision_gets_a_price",
        "gave advantages_n of shape (6,) for a sequence of 5 decisions",
    ),
    "estimates-one-number": (
        estimating(estimate="return Estimate(advantages_n=self.shaped(taken).mean())"),
        "test_every_decision_gets_a_price",
        "gave advantages_n of shape () for a sequence of 5 decisions",
    ),
    "estimates-infinity": (
        estimating(estimate="return Estimate(advantages_n=self.shaped(taken) / 0.0)"),
        "test_every_decision_gets_a_price",
        "the price of a decision is",
    ),
}


class TestEstimates(AlgorithmFaults):
    sound = SOUND
    planted = PLANTED
