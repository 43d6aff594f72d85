"""Small algorithms, sound unless a part of them is given otherwise, that the kit is run on."""

import textwrap

ALGORITHM = """
import random
import torch
from cosmos_core.protocols import Aggregation, AlgorithmCapabilities, Loss, Provider, hookimpl

class Algorithm:
    aggregation = Aggregation.TOKEN_MEAN
    constant_length = 1
    old_logprobs = "behaviour"
    needs_entropy = False
    skips_zero_advantage = True
    {declared}

    def __init__(self, options, context):
        self.seen = 0

    def admit(self, group):
        {admit}

    def advantages(self, groups):
        return [self.of_group(group.samples) for group in groups]

    def of_group(self, samples):
        rewards = [sample.reward if sample.is_scored else None for sample in samples]
        {advantages}
        known = [reward for reward in rewards if reward is not None]
        return [None if each is None else each - (sum(known) - each) / (len(known) - 1) for each in rewards]

    def loss(self, d):
        {loss}

@hookimpl
def cosmos_algorithm():
    return Provider(create=Algorithm, capabilities=AlgorithmCapabilities({capabilities}))
"""
LOSS = """
ratio_N = (d.logprobs_N - d.old_logprobs_N).clamp(-20, 20).exp()
return Loss(loss_N=-d.advantages_N * ratio_N, metrics={"ratio": ratio_N.detach()})
"""
REINFORCE = "return Loss(loss_N=-d.advantages_N * d.logprobs_N)"
SEQUENCE_RATIO = """
log_ratio_N = d.logprobs_N - d.old_logprobs_N
sums_S = torch.zeros(d.num_sequences).index_add(0, d.sequence_N, log_ratio_N)
ratio_S = (sums_S / torch.bincount(d.sequence_N)).clamp(-20, 20).exp()
return Loss(loss_N=-d.advantages_N * ratio_S[d.sequence_N])
"""
CONSULTING = 'consults = {"reference": None}; skips_zero_advantage = False'
NEAR = """
ratio_N = (d.logprobs_N - d.old_logprobs_N).clamp(-20, 20).exp()
distance_N = (d.frozen["reference"].logprobs_N - d.logprobs_N).clamp(-20, 20)
return Loss(loss_N=-d.advantages_N * ratio_N + 0.1 * (distance_N.exp() - 1 - distance_N))
"""


def algorithm(*, loss=LOSS, admit="return None", advantages="", declared="", capabilities="min_group_size=2"):
    inside = {"loss": loss, "admit": admit, "advantages": advantages}
    blocks = {name: textwrap.indent(code.strip(), " " * 8).lstrip() for name, code in inside.items()}
    return ALGORITHM.format(declared=declared.replace("; ", "\n    "), capabilities=capabilities, **blocks)


def failures(outcomes):
    """What the kit's failed tests of an algorithm said, by their names."""
    return {each.test: each.message for each in outcomes if each.result == "failed"}


def num_passed(outcomes):
    """How many of the kit's tests an algorithm passed."""
    return sum(each.result == "passed" for each in outcomes)
