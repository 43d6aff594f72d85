from __future__ import annotations

import os

import pytest
import torch

from cosmos_core.errors import WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.rollout.embedded.ranks.messages import Share
from cosmos_core.rollout.embedded.ranks.staging import RanksUpdate, parts_in
from cosmos_core.rollout.serving.staging import map_staged

LEFT = Share(start=(0, 0), size=(2, 2), shape=(2, 3), dtype="float32")
RIGHT = Share(start=(0, 2), size=(2, 1), shape=(2, 3), dtype="float32")
SCALE = Share(start=(0,), size=(3,), shape=(3,), dtype="bfloat16")
PLACES = {0: {"w": LEFT, "s": SCALE}, 1: {"w": RIGHT, "s": SCALE}}


def piece(name, start, shape):
    return TensorSlice(name=name, start=start, shape=shape)


@pytest.fixture
def update():
    made = RanksUpdate(4, {"w": torch.zeros(2, 2), "s": torch.zeros(3, dtype=torch.bfloat16)}, PLACES)
    yield made
    made.close()


def write_all(update):
    scale = torch.tensor([1, 2, 3], dtype=torch.bfloat16)
    for rank in PLACES:
        update.write_to(rank, piece("s", (0,), (3,)), scale)
    update.write_to(0, piece("w", (0, 0), (2, 2)), torch.tensor([[1.0, 2.0], [4.0, 5.0]]))
    update.write_to(1, piece("w", (1, 2), (1, 1)), torch.tensor([[6.0]]))
    update.write_to(1, piece("w", (0, 2), (1, 1)), torch.tensor([[3.0]]))


def test_another_process_finds_what_was_written_for_its_rank(update):
    write_all(update)
    update.check()
    found = parts_in(map_staged(update.stagings[1].memory.descriptor), PLACES[1])
    assert found["w"].tolist() == [[3.0], [6.0]]
    assert found["s"].tolist() == [1, 2, 3]


def test_what_is_for_another_rank_belongs_to_the_caller_again_at_once(update):
    data = torch.tensor([[3.0], [6.0]])
    update.write_to(1, piece("w", (0, 2), (2, 1)), data)
    data.zero_()
    assert update.stagings[1].tensors["w"].tolist() == [[3.0], [6.0]]


def test_the_memory_is_gone_with_the_update(update):
    write_all(update)
    descriptor = update.stagings[1].memory.descriptor
    os.fstat(descriptor)
    update.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize(
    ("rank", "written", "data", "message"),
    [
        (2, piece("w", (0, 0), (1, 1)), torch.zeros(1, 1), "rank 2 does not exist: this engine has ranks 0 to 1"),
        (1, piece("w", (0, 0), (2, 1)), torch.zeros(2, 1), r"w: a slice .* is not in the part of rank 1"),
        (0, piece("w", (0, 2), (2, 1)), torch.zeros(2, 1), r"w: a slice .* is not in the part of rank 0"),
        (1, piece("w", (0, 2), (2, 1)), torch.zeros(2, 2), r"w: data of shape \(2, 2\) for a slice of \(2, 1\)"),
    ],
)
def test_what_a_rank_does_not_hold_is_refused(update, rank, written, data, message):
    with pytest.raises(WeightSyncError, match=message):
        update.write_to(rank, written, data)


def test_a_hole_in_what_is_for_a_rank_is_found(update):
    update.write_to(0, piece("s", (0,), (3,)), torch.zeros(3, dtype=torch.bfloat16))
    update.write_to(0, piece("w", (0, 0), (2, 2)), torch.zeros(2, 2))
    with pytest.raises(WeightSyncError, match="update to version 4: nothing was written for rank 1"):
        update.check()
    update.write_to(1, piece("w", (0, 2), (1, 1)), torch.zeros(1, 1))
    update.write_to(1, piece("s", (0,), (3,)), torch.zeros(3, dtype=torch.bfloat16))
    with pytest.raises(WeightSyncError, match=r"rank 1: update to version 4: 1 of 2 tensors .* the first is 'w'"):
        update.check()


def test_what_the_first_rank_holds_is_compared_with_what_was_written_for_it(update):
    # The first column is written twice: what was written last counts.
    update.write_to(0, piece("w", (0, 0), (2, 1)), torch.full((2, 1), 9.0))
    write_all(update)
    update.apply()
    assert update.first_wrong() == ""
    update.write_to(0, piece("w", (1, 0), (1, 1)), torch.tensor([[-0.0]]))
    assert update.first_wrong() == "w"
    update.apply()
    assert update.first_wrong() == ""
    # A zero of the other sign is equal as a number, and is another weight all the same.
    update._tensors["w"].abs_()
    assert update.first_wrong() == "w"
