"""What an algorithm is that says nothing of itself."""

import math

from cosmos_core.protocols import Aggregation, PlainAlgorithm
from cosmos_core.types import Group, Sample, SampleStatus


class Bare(PlainAlgorithm):
    pass


class Choosy(PlainAlgorithm):
    old_logprobs = "behaviour"

    def __init__(self, length):
        self.constant_length = length


def group(reward):
    sample = Sample(
        index=0,
        status=SampleStatus.OK,
        reward=reward,
        rewards={},
        oldest_version=0,
        newest_version=0,
        num_units=1,
        num_prompt_units=1,
    )
    return Group(position=0, samples=(sample,))


def test_it_asks_for_nothing():
    bare = Bare()
    assert (bare.aggregation, bare.constant_length, bare.old_logprobs) == (Aggregation.TOKEN_MEAN, 1, "none")
    assert not bare.needs_entropy
    assert not bare.skips_zero_advantage


def test_it_admits_groups_whose_rewards_are_numbers():
    assert Bare().admit(group(1.0)) is None
    assert Bare().admit(group(math.nan)) == "reward not finite"


def test_an_instance_says_what_differs_and_no_other_changes():
    assert (Choosy(7).constant_length, Choosy(9).constant_length, Bare().constant_length) == (7, 9, 1)
    assert (Choosy(7).old_logprobs, Choosy(7).aggregation) == ("behaviour", Aggregation.TOKEN_MEAN)
