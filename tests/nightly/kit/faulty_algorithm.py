"""Small algorithms, sound unless a part of them is given otherwise, that the kit is run on."""

import textwrap
from typing import ClassVar

import pytest

from tests.nightly.kit.outcomes import unnamed, wrong

ALGORITHM = """
import random
import torch
from cosmos_core.protocols import Aggregation, AlgorithmCapabilities, Loss, PlainAlgorithm, Provider, hookimpl

class Algorithm(PlainAlgorithm):
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


class AlgorithmFaults:
    """The kit on small algorithms: all of it passes with the sound ones, and names the fault of each planted one.

    `sound` is, by name, a source and what its test class adds to the kit; `planted` a source, the test that fails, and
    what it says; `bodies` what the test classes of planted ones add.
    """

    sound: ClassVar[dict[str, tuple[str, str]]]
    planted: ClassVar[dict[str, tuple[str, str, str]]]
    bodies: ClassVar[dict[str, str]] = {}

    @pytest.fixture(scope="class")
    @classmethod
    def outcomes(cls, run_kit):
        sources = {name: source for name, (source, *_) in (cls.sound | cls.planted).items()}
        bodies = {name: body for name, (_, body) in cls.sound.items()} | cls.bodies
        return run_kit("algorithm", sources, bodies=bodies)

    def test_sound_algorithms_pass(self, outcomes):
        assert wrong(outcomes, self.sound) == {}
        for name in self.sound:
            assert sum(each.result == "passed" for each in outcomes[name]) > 6, name

    def test_each_fault_is_named(self, outcomes):
        assert unnamed(outcomes, self.planted) == {}
