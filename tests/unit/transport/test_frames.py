from __future__ import annotations

import itertools
import random

import attrs
import pytest

from cosmos_core.errors import TransportError
from cosmos_core.transport.frames import MAX_FRAMES, REPLIES, Found, pack, unpack
from cosmos_core.types import Array, Payload
from cosmos_core.types.payload import ITEM_SIZES

LARGE = 100_000


def payload(**arrays: Array) -> Payload:
    return Payload(kind="latents", arrays=arrays)


def round_trip(payloads: list[Payload]) -> list[Payload]:
    packed = pack(payloads)
    return unpack(packed.payloads, [memoryview(frame) for frame in packed.frames])


def test_each_dtype_survives(subtests):
    for dtype, count in itertools.product(sorted(ITEM_SIZES), [0, 3, LARGE]):
        with subtests.test(dtype=dtype, count=count):
            data = random.Random(1).randbytes(count * ITEM_SIZES[dtype])
            (received,) = round_trip([payload(x=Array(dtype=dtype, shape=(count, 1), data=data))])
            array = received.arrays["x"]
            assert (received.kind, array.dtype, array.shape) == ("latents", dtype, (count, 1))
            assert bytes(array.data) == data
            assert array.data.readonly


def test_small_arrays_share_a_frame_and_large_ones_are_not_copied():
    large = bytearray(LARGE)
    packed = pack(
        [
            payload(a=Array(dtype="uint8", shape=(3,), data=b"abc"), b=Array(dtype="uint8", shape=(2,), data=b"de")),
            payload(c=Array(dtype="uint8", shape=(LARGE,), data=memoryview(large))),
        ]
    )
    assert len(packed.frames) == 2
    large[0] = 7
    first, second = unpack(packed.payloads, [memoryview(frame) for frame in packed.frames])
    assert bytes(first.arrays["a"].data) == b"abc"
    assert bytes(first.arrays["b"].data) == b"de"
    assert second.arrays["c"].data[0] == 7


def test_what_payloads_share_lies_there_once(subtests):
    for count in [3, LARGE]:
        with subtests.test(count=count):
            shared, alike = (Array(dtype="uint8", shape=(count,), data=b"a" * count) for _ in range(2))
            own = [Array(dtype="uint8", shape=(1,), data=bytes([index])) for index in range(4)]
            payloads = [payload(text=shared, own=each) for each in own]
            assert pack(payloads).nbytes < count + 100
            received = round_trip([*payloads, payload(text=alike)])
            assert all(each.arrays["text"] is received[0].arrays["text"] for each in received[:4])
            assert received[4].arrays["text"] is not received[0].arrays["text"]
            assert bytes(received[3].arrays["text"].data) == shared.data
            assert [bytes(each.arrays["own"].data) for each in received[:4]] == [each.data for each in own]


def test_shaped_memoryviews_are_taken():
    data = memoryview(bytearray(range(24))).cast("B", (4, 6))
    (received,) = round_trip([payload(x=Array(dtype="uint8", shape=(4, 6), data=data))])
    assert bytes(received.arrays["x"].data) == bytes(range(24))
    empty = memoryview(bytearray())
    (received,) = round_trip([payload(x=Array(dtype="int64", shape=(0, 5), data=empty))])
    assert received.arrays["x"].shape == (0, 5)
    assert round_trip([]) == []


def test_a_header_that_does_not_fit_is_refused(subtests):
    for change, message in [
        ({"frame": 5}, "frame 5 of 2"),
        ({"offset": LARGE}, "'x'.* needs .* got"),
        ({"shape": (LARGE + 1,)}, "'x'.* needs .* got"),
        ({"shape": (2**60, 2**60)}, "'x'.* needs"),
        ({"dtype": "object"}, "'object' is not one of"),
    ]:
        with subtests.test(change=change, message=message):
            packed = pack([payload(x=Array(dtype="uint8", shape=(LARGE,), data=bytes(LARGE)))])
            (header,) = packed.payloads
            wrong = attrs.evolve(header, arrays=(attrs.evolve(header.arrays[0], **change),))
            with pytest.raises(TransportError, match=message):
                unpack([wrong], [memoryview(frame) for frame in packed.frames])


def test_more_large_arrays_than_frames_are_refused():
    shared = bytes(LARGE)
    arrays = {f"a{index}": Array(dtype="uint8", shape=(LARGE,), data=shared) for index in range(MAX_FRAMES)}
    said = f"^{MAX_FRAMES} large arrays under one lease; at most {MAX_FRAMES - 1} can be sent$"
    with pytest.raises(TransportError, match=said):
        pack([payload(**arrays)])
    arrays.popitem()
    assert len(pack([payload(**arrays)]).frames) == MAX_FRAMES


def test_negative_sizes_do_not_decode():
    packed = pack([payload(x=Array(dtype="uint8", shape=(4,), data=bytes(4)))])
    header = attrs.evolve(packed.payloads[0].arrays[0], shape=(-2, -2))
    found = Found(request=1, lease=1, payloads=(attrs.evolve(packed.payloads[0], arrays=(header,)),))
    with pytest.raises(TransportError, match="malformed"):
        REPLIES.decode(REPLIES.encode(found))


def test_mutated_headers_raise_transport_errors_only():
    rng = random.Random(3)
    packed = pack([payload(x=Array(dtype="int32", shape=(5,), data=bytes(20)))] * 3)
    data = REPLIES.encode(Found(request=1, lease=1, payloads=packed.payloads))
    for _ in range(3000):
        mutant = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            mutant[rng.randrange(len(mutant))] = rng.randrange(256)
        try:
            reply = REPLIES.decode(bytes(mutant))
            if isinstance(reply, Found):
                unpack(reply.payloads, [memoryview(frame) for frame in packed.frames])
        except TransportError:
            continue
