from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch

from cosmos_core.policy.batches.batch import Counts, TrainSequence
from cosmos_core.policy.training.microbatch import decision_weights, know
from cosmos_core.protocols import Aggregation, NoOptions
from cosmos_core.types import Array, Prompt
from tests.world_model import World, walked

TOTALS = Counts(sequences=5, decisions=40, trained=4)


def test_weights_by_hand():
    assert decision_weights(Aggregation.TOKEN_MEAN, 0, [2, 8], TOTALS) == [1 / 40, 1 / 40]
    assert decision_weights(Aggregation.SEQUENCE_MEAN_TOKEN_MEAN, 0, [2, 8], TOTALS) == [1 / 10, 1 / 40]
    assert decision_weights(Aggregation.SEQUENCE_MEAN_TOKEN_SUM, 20, [2, 8], TOTALS) == [1 / 100, 1 / 100]


@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_an_empty_batch_divides_by_nothing(aggregation):
    assert decision_weights(aggregation, 10, [], Counts()) == []


def test_what_is_known_follows_the_order_of_the_micro_batch(model, kit):
    payloads = [
        kit.payload([1], [2, 3], version=4, logprobs=[-0.5, -1.0]),
        kit.payload([1, 2], [5, 6, 7], version=6, logprobs=[-2.0, -3.0, -4.0]),
    ]
    sequences = [TrainSequence(payload=p, advantage=a) for p, a in zip(payloads, (0.5, -1.0), strict=True)]
    (batch,) = model.pack(payloads, budget=20)
    assert batch.sequences == (1, 0)
    known = know(kit.Reinforce(), batch, sequences, kit.counts_of(sequences), kit.CPU)
    assert known.behaviour_logprobs_N.tolist() == [-2.0, -3.0, -4.0, -0.5, -1.0]
    assert known.versions_N.tolist() == [6, 6, 6, 4, 4]
    assert known.advantages_N.tolist() == [-1.0, -1.0, -1.0, 0.5, 0.5]
    assert known.sequence_N.tolist() == [0, 0, 0, 1, 1]
    torch.testing.assert_close(known.weights_N, torch.full((5,), 0.2))
    assert known.num_sequences == 2
    assert known.has_behaviour


def test_a_sequence_without_decisions_counts_as_one(model, kit):
    sequences = [TrainSequence(payload=kit.payload([1, 2, 3], c), advantage=1.0) for c in ([4, 5], [])]
    (batch,) = model.pack([sequence.payload for sequence in sequences], budget=20)
    assert know(kit.Reinforce(), batch, sequences, kit.counts_of(sequences), kit.CPU).num_sequences == 2


def test_squared_errors_of_regressions_are_no_log_probs_to_compare_with(kit):
    """What an engine gives for them would make a divergence of policies that is none."""
    world = World(NoOptions(), SimpleNamespace(path=None))
    sample = world.noised(world.encode_demonstration(Prompt(text="x", demonstration="y")), 0)
    number = sample.arrays["times"].shape[0]
    logprobs = Array(dtype="float32", shape=(number,), data=np.full(number, -2.0, np.float32).tobytes())
    learned = attrs.evolve(sample, arrays={**sample.arrays, "logprobs": logprobs})
    walk = walked(world.encode(Prompt(text="x")), 2, 1)
    for payload, expected in ((learned, False), (walk, True)):
        sequences = [TrainSequence(payload=payload, advantage=1.0)]
        (batch,) = world.pack([payload], budget=99)
        known = know(kit.Reinforce(), batch, sequences, Counts(sequences=1, decisions=9, trained=1), kit.CPU)
        assert known.has_behaviour == expected
        assert (known.behaviour_logprobs_N != 0).all()
