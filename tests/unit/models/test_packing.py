import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_core.errors import DataError
from cosmos_core.models.packing import fill_bins, pack, padded_sizes
from cosmos_core.models.tokens import array_of, tokens_payload

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


@given(
    st.lists(st.tuples(tokens, tokens), min_size=1, max_size=12),
    st.integers(23, 60),
    st.sampled_from([1, 2, 8, 12]),
    st.booleans(),
)
def test_padding_is_one_more_document_that_decides_nothing(pairs, budget, multiple, is_uniform):
    payloads = [tokens_payload(*pair) for pair in pairs]
    plain = pack(payloads, budget=budget)
    padded = pack(payloads, budget=budget, multiple=multiple, is_uniform=is_uniform)

    assert [batch.sequences for batch in padded] == [batch.sequences for batch in plain]
    for batch, bare in zip(padded, plain, strict=True):
        assert batch.num_units % multiple == 0
        assert batch.num_units == len(batch.inputs["tokens"]) == len(batch.inputs["positions"])
        padding = batch.num_units - bare.num_units
        assert batch.inputs["lengths"].tolist() == bare.inputs["lengths"].tolist() + [padding] * (padding > 0)
        assert batch.inputs["positions"].tolist() == bare.inputs["positions"].tolist() + list(range(padding))
        assert batch.inputs["tokens"][: bare.num_units].equal(bare.inputs["tokens"])
        assert batch.inputs["decisions"].equal(bare.inputs["decisions"])
        assert batch.inputs["targets"].equal(bare.inputs["targets"])


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20), st.sampled_from([1, 6, 8]))
def test_uniform_rows_have_one_size_of_a_few(sizes, multiple):
    uniform = padded_sizes(sizes, 1000, multiple, is_uniform=True)
    assert len(set(uniform)) == 1
    assert uniform[0] >= max(sizes)
    possible = {padded_sizes([size], 1000, multiple, is_uniform=True)[0] for size in range(1, 1001)}
    assert len(possible) <= 8


def test_rows_that_fit_are_not_padded():
    (batch,) = pack([tokens_payload([1, 2], [3, 4, 5])], budget=8, multiple=4)
    assert batch.inputs["lengths"].tolist() == [4]


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(30, 100))
def test_bins_are_few_and_in_descending_order(lengths, capacity):
    bins = fill_bins(lengths, capacity)

    assert bins == fill_bins(list(lengths), capacity)
    for members in bins:
        sizes = [lengths[i] for i in members]
        assert sizes == sorted(sizes, reverse=True)
    # First fit leaves at most one bin half empty or more.
    assert sum(sum(lengths[i] for i in members) * 2 <= capacity for members in bins) <= 1


def told(payload, decided):
    array = array_of(np.asarray(decided, np.bool_))
    return attrs.evolve(payload, arrays={**payload.arrays, "decided": array})


def test_only_what_was_decided_is_a_decision_and_all_of_it_is_read():
    first = told(tokens_payload([1, 2], [3, 4, 5, 6, 7]), [True, True, False, False, True])
    second = tokens_payload([8], [9, 10])
    (batch,) = pack([first, second], budget=16)
    assert batch.sequences == (0, 1)
    assert batch.num_decisions == (3, 2)
    assert batch.num_units == 8
    assert batch.inputs["tokens"].tolist() == [1, 2, 3, 4, 5, 6, 8, 9]
    assert batch.inputs["targets"].tolist() == [3, 4, 7, 9, 10]
    assert batch.inputs["decisions"].tolist() == [1, 2, 5, 6, 7]


def test_what_cannot_be_packed_is_refused(subtests):
    with pytest.raises(DataError, match=r"sequence 1 of 9 tokens exceeds .* 8; raise policy\.micro_batch_units"):
        pack([tokens_payload([1], [2]), tokens_payload([1] * 5, [2] * 5)], budget=8)

    with pytest.raises(DataError, match="payload 0 has an empty prompt"):
        pack([tokens_payload([], [2])], budget=8)

    for decided, message in [
        (np.ones(2, np.bool_), r"`decided` is bool \[2\] of a completion \[3\]"),
        (np.ones(3, np.int32), "is int32"),
    ]:
        with subtests.test(decided=decided, message=message):
            payload = tokens_payload([1], [2, 3, 4])
            with pytest.raises(DataError, match=message):
                pack([attrs.evolve(payload, arrays={**payload.arrays, "decided": array_of(decided)})], budget=16)
