from __future__ import annotations

import attrs
import pytest
import torch

from cosmos_core.errors import EngineError, WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.rollout.embedded.ranks import follower
from cosmos_core.rollout.embedded.ranks.messages import Share
from cosmos_core.rollout.embedded.ranks.shares import Shares, joined, layout_of, local
from cosmos_core.weights.digest import tensor_digest

UPPER = Share(start=(0, 0), size=(2, 3), shape=(3, 3), dtype="float32")
LOWER = Share(start=(2, 0), size=(1, 3), shape=(3, 3), dtype="float32")
WHOLE = Share(start=(0,), size=(2,), shape=(2,), dtype="float32")
PLACES = {0: {"w": UPPER, "n": WHOLE}, 1: {"w": LOWER, "n": WHOLE}}


def test_parts_that_make_up_each_tensor_are_its_cells():
    cells = joined(PLACES)
    assert cells.of(0) == {"w": [box("w", UPPER)], "n": [box("n", WHOLE)]}
    assert cells.of(1) == {"w": [box("w", LOWER)], "n": [box("n", WHOLE)]}
    # Nothing is asked of what a rank has no element of.
    empty = attrs.evolve(LOWER, start=(3, 0), size=(0, 3))
    whole = attrs.evolve(UPPER, size=(3, 3))
    assert joined({0: {"w": whole}, 1: {"w": empty}}).of(1) == {"w": []}


def box(name, place):
    return TensorSlice(name=name, start=place.start, shape=place.size)


@pytest.mark.parametrize(
    "changed",
    [
        attrs.evolve(LOWER, size=(1, 2)),
        attrs.evolve(LOWER, shape=(4, 3)),
        attrs.evolve(LOWER, dtype="bfloat16"),
        UPPER,
        # All is there, but what both hold is not what either reads back.
        attrs.evolve(LOWER, start=(1, 0), size=(2, 3)),
    ],
)
def test_parts_that_do_not_make_up_a_tensor_are_refused(changed):
    with pytest.raises(EngineError, match=r"w: the 2 ranks of the engine hold \d+ of its \d+ elements"):
        joined({**PLACES, 1: {"w": changed, "n": WHOLE}})


def test_a_slice_is_found_in_the_part_of_its_rank():
    piece = TensorSlice(name="w", start=(2, 1), shape=(1, 2))
    assert local(piece, PLACES[1], 1) == TensorSlice(name="w", start=(0, 1), shape=(1, 2))
    with pytest.raises(WeightSyncError, match=r"w: a slice of \(1, 2\) at \(2, 1\) is not in the part of rank 0"):
        local(piece, PLACES[0], 0)
    with pytest.raises(WeightSyncError, match="rank 1: 'x' is not a tensor of this model"):
        local(TensorSlice(name="x", start=(0,), shape=(1,)), PLACES[1], 1)


def test_a_layout_lists_nothing_that_a_rank_has_no_element_of():
    empty = attrs.evolve(LOWER, start=(3, 0), size=(0, 3))
    assert layout_of({"w": empty, "n": WHOLE}) == [(TensorSlice(name="n", start=(0,), shape=(2,)), "float32")]


def test_a_rank_that_copied_something_wrong_names_the_tensor(monkeypatch):
    shares = Shares(torch.nn.Linear(3, 2))
    written = {"weight": torch.full((2, 3), 2.0), "bias": torch.full((2,), -0.0)}
    loaded = follower.load(shares, written)
    assert loaded.wrong == ""
    assert loaded.digests == {name: tensor_digest(name, tensor) for name, tensor in written.items()}
    # A zero of the other sign is equal as a number, and is another weight all the same.
    monkeypatch.setattr(follower, "copy_exactly", lambda target, source: target.copy_(source.abs()))
    assert follower.load(shares, written).wrong == "bias"
