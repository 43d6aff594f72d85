from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest

from cosmos_core.errors import TransportError
from cosmos_core.weights import changes
from cosmos_core.weights.changes import decode, encode

ELEMENTS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def versions(length, itemsize, places):
    """A slice, and another that differs from it at these places and nowhere else."""
    draw = np.random.default_rng(length + itemsize)
    base = np.frombuffer(draw.bytes(length * itemsize), dtype=ELEMENTS[itemsize])
    new = base.copy()
    new[places] ^= draw.integers(1, 256, len(places)).astype(base.dtype)
    return base, new


def made(base, new):
    """(encoding, bytes sent), once what is made of them has been found to be right; they may lie anywhere."""
    encoding, data = encode(memoryview(base).cast("B"), memoryview(new).cast("B"), base.itemsize)
    sent = np.frombuffer(data, dtype=np.uint8)
    if encoding != "whole":
        shifted = np.empty(len(sent) + 1, dtype=np.uint8)[1:]
        shifted[:] = sent
        before = base.tobytes()
        found = decode("w", encoding, shifted, memoryview(base).cast("B"), base.itemsize)
        assert base.tobytes() == before
    else:
        found = sent
    assert found.tobytes() == new.tobytes()
    return encoding, len(sent)


LENGTHS = (0, 1, 7, 8, 255, 256, 257, 65537, 100_003)
SHARES = (0.0, 0.0001, 0.003, 0.04, 0.12, 0.13, 0.5, 0.95, 1.0)


def test_a_slice_is_made_of_its_base_and_what_changed_bit_for_bit():
    for case in itertools.product(ELEMENTS, LENGTHS, SHARES):
        itemsize, length, share = case
        places = np.flatnonzero(np.random.default_rng(3).random(length) < share)
        encoding, nbytes = made(*versions(length, itemsize, places))
        smallest = min(
            -(-length // 8) + len(places) * itemsize,
            # Were every gap one byte long.
            len(places) * (1 + itemsize) + length // 256 * (1 + itemsize),
            len(places) * (4 + itemsize),
        )
        if smallest < 7 / 8 * length * itemsize - 1:
            assert (encoding != "whole", nbytes <= smallest) == (True, True), case
        else:
            assert nbytes <= length * itemsize, case


def test_one_change_costs_a_few_bytes_wherever_it_is():
    for case in itertools.product(ELEMENTS, (0, 1, 255, 256, 511, 512, 65535, 65536, 131071, 131072, 199_999)):
        itemsize, place = case
        encoding, nbytes = made(*versions(200_000, itemsize, [place]))
        assert encoding.startswith("gaps-"), case
        assert nbytes <= 4 + itemsize, case


def test_the_smallest_encoding_is_chosen():
    smallest = {0.0: "gaps-1", 0.000005: "gaps-4", 0.0005: "gaps-2", 0.04: "gaps-1", 0.3: "bitmap"}
    draws = np.random.default_rng(3).random(400_000)
    assert {share: made(*versions(400_000, 2, np.flatnonzero(draws < share)))[0] for share in smallest} == smallest


def test_what_all_changed_is_sent_as_it_lies_and_unchanged_slices_cost_nothing():
    base, new = versions(1000, 2, np.arange(1000))
    assert encode(memoryview(base).cast("B"), (sent := memoryview(new).cast("B")), 2)[1] is sent
    assert made(base, base) == ("gaps-1", 0)


def test_zeros_of_another_sign_and_numbers_that_are_none_count_as_bits():
    for dtype, element in ((np.float16, np.uint16), (np.float32, np.uint32)):
        base = np.array([0.0, np.nan, 1.0] * 50, dtype=dtype)
        new = base.copy()
        new[0] = -0.0
        assert made(base.view(element), new.view(element)) == ("gaps-1", 1 + base.itemsize)


def test_other_sizes_come_whole():
    new = memoryview(bytes(range(48)))
    assert encode(memoryview(bytes(48)), new, 16)[1] is new
    assert encode(memoryview(bytes(47)), new, 1)[0] == "whole"


def packed(*parts):
    return np.frombuffer(b"".join(np.asarray(each).tobytes() for each in parts), dtype=np.uint8)


U8, U16, U32 = np.uint8, np.uint16, np.uint32
MALFORMED = {
    "cut off": ("gaps-1", packed(U16(7), U8(0), U8(1)), "4 bytes are no changes of 20 elements, of 3 bytes each"),
    "more changes than elements": ("gaps-1", packed(np.zeros(63, U8)), "63 bytes are no changes of 20"),
    "beyond the end": ("gaps-1", packed(U16([7, 7]), U8([9, 10])), "a change at element 20 of a slice of 20"),
    "far beyond the end": ("gaps-4", packed(U16([7] * 3), U32([2**32 - 1] * 3)), "a change at element 12,884,901,887"),
    "a sum past the numbers": ("gaps-2", packed(U16([7] * 20), U16([65535] * 20)), "a change at element 1,310,719"),
    "no room for the bits": ("bitmap", packed(U8([0, 0])), "2 bytes are too few for a bitmap of 20 elements"),
    "too few values": ("bitmap", packed(U16(7), U8([0b11000000, 0, 0])), "marks 2 changes, and 2 bytes of 2 each"),
    "too many values": ("bitmap", packed(U16([7, 7]), U8([0b10000000, 0, 0])), "marks 1 changes, and 4 bytes"),
    "half a value": ("bitmap", packed(U8(7), U8([0, 0, 0])), "marks 0 changes, and 1 bytes"),
    "bits past the end": ("bitmap", packed(U16(7), U8([0, 0, 0b00001000])), "a change at element 20 of a slice of 20"),
    "no encoding": ("whole", packed(U16(7)), "changes encoded as 'whole' of elements of 2 bytes"),
}


def test_what_does_not_fit_the_slice_is_refused_by_name_and_nothing_is_written(subtests):
    base = np.arange(20, dtype=np.uint16)
    for case, (encoding, data, reason) in MALFORMED.items():
        with subtests.test(case=case), pytest.raises(TransportError, match=f"^w: .*{reason}"):
            decode("w", encoding, data, memoryview(base).cast("B"), 2)
    assert (base == np.arange(20)).all()


def test_random_bytes_are_refused_or_stay_within_the_slice():
    draw = np.random.default_rng(5)
    base = memoryview(bytes(64))
    num_read = 0
    for _ in range(500):
        data = np.frombuffer(draw.bytes(int(draw.integers(0, 40))), dtype=np.uint8)
        encoding = draw.choice(["bitmap", *changes._GAPS])
        with contextlib.suppress(TransportError):
            assert len(decode("w", encoding, data, base, 2)) == 64
            num_read += 1
    assert 0 < num_read < 500
