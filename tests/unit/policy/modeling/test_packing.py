import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_core.errors import DataError
from cosmos_core.policy.modeling.packing import fill_bins, pack
from cosmos_core.policy.modeling.tokens import tokens_payload

tokens = st.lists(st.integers(0, 999), min_size=1, max_size=12)


@given(st.lists(st.tuples(tokens, st.lists(st.integers(0, 999), max_size=12)), max_size=20), st.integers(23, 60))
def test_each_payload_is_packed_exactly_once_within_the_budget(pairs, budget):
    batches = pack([tokens_payload(*pair) for pair in pairs], budget=budget)

    assert sorted(index for batch in batches for index in batch.sequences) == list(range(len(pairs)))
    for batch in batches:
        assert batch.num_units == sum(batch.inputs["lengths"].tolist()) == len(batch.inputs["tokens"]) <= budget
        assert sum(batch.num_decisions) == len(batch.inputs["targets"]) == len(batch.inputs["decisions"])
        _check_places(batch, pairs)


def _check_places(batch, pairs):
    start = decision = 0
    row = batch.inputs["tokens"].tolist()
    for index, length, number in zip(
        batch.sequences, batch.inputs["lengths"].tolist(), batch.num_decisions, strict=True
    ):
        prompt, completion = pairs[index]
        whole = prompt + completion
        assert row[start : start + length] == whole[:length]
        assert batch.inputs["positions"][start : start + length].tolist() == list(range(length))
        places = batch.inputs["decisions"][decision : decision + number].tolist()
        assert places == [start + len(prompt) - 1 + step for step in range(number)]
        assert batch.inputs["targets"][decision : decision + number].tolist() == completion
        start += length
        decision += number


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(30, 100))
def test_bins_are_few_and_in_descending_order(lengths, capacity):
    bins = fill_bins(lengths, capacity)

    assert bins == fill_bins(list(lengths), capacity)
    for members in bins:
        sizes = [lengths[i] for i in members]
        assert sizes == sorted(sizes, reverse=True)
    # First fit leaves at most one bin half empty or more.
    assert sum(sum(lengths[i] for i in members) * 2 <= capacity for members in bins) <= 1


def test_a_sequence_over_the_budget_is_refused_with_the_key_to_change():
    with pytest.raises(DataError, match=r"sequence 1 of 9 tokens exceeds .* 8; raise policy\.micro_batch_units"):
        pack([tokens_payload([1], [2]), tokens_payload([1] * 5, [2] * 5)], budget=8)


def test_an_empty_prompt_is_refused():
    with pytest.raises(DataError, match="payload 0 has an empty prompt"):
        pack([tokens_payload([], [2])], budget=8)
