"""Weights of decisions that the trainer and the engine see differently."""

import math

import pytest
import torch

from cosmos_algorithm_grpo.correction import kept_sequences, masked_weight, truncated_weight


def test_truncated_weight_is_capped_above_only_and_detached():
    old_N = torch.tensor([math.log(3.0), math.log(0.1), 0.0], requires_grad=True)
    weight_N = truncated_weight(old_logprobs_N=old_N, behaviour_logprobs_N=torch.zeros(3), cap=2.0)
    assert weight_N.tolist() == pytest.approx([2.0, 0.1, 1.0])
    assert not weight_N.requires_grad


def test_a_masked_weight_is_the_ratio_within_its_range_and_nothing_outside():
    old_N = torch.tensor([math.log(3.0), math.log(6.0), math.log(0.4), math.log(0.6), 0.0], requires_grad=True)
    weight_N = masked_weight(old_logprobs_N=old_N, behaviour_logprobs_N=torch.zeros(5), floor=0.5, cap=5.0)
    assert weight_N.tolist() == pytest.approx([3.0, 0.0, 0.0, 0.6, 1.0])
    assert not weight_N.requires_grad


def test_a_ratio_that_is_no_number_is_seen():
    weight_N = masked_weight(
        old_logprobs_N=torch.tensor([math.nan, 0.0]), behaviour_logprobs_N=torch.zeros(2), floor=0.5, cap=5.0
    )
    assert math.isnan(weight_N[0])
    assert weight_N[1] == 1.0


def kept(logprobs, behaviour, advantages, sequences, limit=0.5):
    kept_N = kept_sequences(
        logprobs_N=torch.tensor(logprobs, requires_grad=True),
        behaviour_logprobs_N=torch.tensor(behaviour),
        advantages_N=torch.tensor(advantages),
        sequence_N=torch.tensor(sequences),
        num_sequences=max(sequences) + 1,
        limit=limit,
    )
    assert not kept_N.requires_grad
    return kept_N.tolist()


def test_sequences_of_negative_advantage_that_are_far_off_do_not_count():
    # The means of log(behaviour / current) are 0.6, 0.6 and 0.4.
    logprobs, behaviour = [-1.2, -1.0, -1.6, -1.4, -1.0], [-1.0, 0.0, -1.0, -1.0, -0.6]
    sequences = [0, 0, 1, 2, 2]
    assert kept(logprobs, behaviour, [-1.0, -1.0, 1.0, -1.0, -1.0], sequences) == [0.0, 0.0, 1.0, 1.0, 1.0]
    # The mean is over a sequence, not over its tokens one by one.
    assert kept([-3.0, -0.1], [-0.1, -3.0], [-1.0, -1.0], [0, 0]) == [1.0, 1.0]
    # What became likelier counts, and a sequence without decisions here breaks nothing.
    assert kept([-0.1], [-3.0], [-1.0], [0]) == [1.0]
    assert kept([-3.0], [-0.1], [-1.0], [1]) == [0.0]
