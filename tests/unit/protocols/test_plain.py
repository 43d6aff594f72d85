"""What an algorithm is that says nothing of itself."""

from cosmos_core.protocols import Aggregation, PlainAlgorithm


class Bare(PlainAlgorithm):
    pass


class Choosy(PlainAlgorithm):
    old_logprobs = "behaviour"

    def __init__(self, length):
        self.constant_length = length


def test_it_asks_for_nothing_and_an_instance_says_what_differs_and_no_other_changes():
    bare = Bare()
    assert (bare.aggregation, bare.constant_length, bare.old_logprobs) == (Aggregation.TOKEN_MEAN, 1, "none")
    assert not bare.needs_entropy
    assert not bare.skips_zero_advantage
    assert (Choosy(7).constant_length, Choosy(9).constant_length, Bare().constant_length) == (7, 9, 1)
    assert (Choosy(7).old_logprobs, Choosy(7).aggregation) == ("behaviour", Aggregation.TOKEN_MEAN)
