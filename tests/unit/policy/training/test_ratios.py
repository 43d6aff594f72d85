"""Ratios of a step that are kept: of sequences that are in this process whole, as far as there is room."""

from types import SimpleNamespace

import numpy as np
import torch

from cosmos_core.policy.training import ratios
from cosmos_core.policy.training.microbatch import Span


def prepared(*batches):
    """Micro-batches, each of (place, decisions that are here, decisions of the whole sequence)."""
    places = [place for batch in batches for place, _, _ in batch]
    numbers = iter(range(len(places)))
    made = [
        SimpleNamespace(
            sequences=[next(numbers) for _ in batch],
            num_decisions=[number for _, number, _ in batch],
            spans=[Span(first=0, total=total) for _, _, total in batch],
        )
        for batch in batches
    ]
    known = [
        SimpleNamespace(
            has_behaviour=True, behaviour_logprobs_N=torch.full((sum(number for _, number, _ in batch),), -1.0)
        )
        for batch in batches
    ]
    return SimpleNamespace(batches=made, known=known, sequences=[SimpleNamespace(place=place) for place in places])


def test_only_whole_sequences_have_ratios(monkeypatch):
    found, some = ratios.Ratios(), prepared([(7, 2, 2), (4, 1, 3)], [(5, 1, 1)], [(6, 2, 2)])
    monkeypatch.setattr(ratios, "_MOST", 5)
    for index, logprobs in enumerate(([-1.0, -2.0, 0.0], [0.0], [0.0, 0.0])):
        found.take(some, index, torch.tensor(logprobs))
    read = found.read()
    assert sorted(read) == [5, 7]
    np.testing.assert_allclose(read[7], np.exp([0.0, -1.0]), rtol=1e-6)
    np.testing.assert_allclose(read[5], np.exp([1.0]), rtol=1e-6)


def test_what_no_engine_recorded_has_none():
    some = prepared([(7, 2, 2)])
    some.known[0].has_behaviour = False
    found = ratios.Ratios()
    found.take(some, 0, torch.zeros(2))
    assert found.read() == {}
