import random

from cosmos_core.policy.batches.batch import balanced


def test_the_longest_first_each_to_the_emptiest():
    assert balanced([5, 9, 4, 1], 2) == [(1, 3), (0, 2)]


def test_every_sequence_is_in_one_share():
    draw = random.Random(0)
    lengths = [draw.randrange(1, 1000) for _ in range(101)]
    shares = balanced(lengths, 7)
    assert sorted(index for share in shares for index in share) == list(range(101))
    totals = [sum(lengths[index] for index in share) for share in shares]
    assert max(totals) <= sum(lengths) / 7 * 4 / 3
    assert max(totals) - min(totals) <= max(lengths)


def test_fewer_sequences_than_shares_leave_some_empty():
    assert balanced([3], 3) == [(0,), (), ()]
    assert balanced([], 2) == [(), ()]
