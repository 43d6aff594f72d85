import pytest

from cosmos_core.types import Array, Payload


def test_arrays_know_their_size_in_bytes() -> None:
    array = Array(dtype="bfloat16", shape=(2, 3), data=bytes(12))
    scalar = Array(dtype="int64", shape=(), data=bytes(8))
    view = Array(dtype="float32", shape=(6,), data=memoryview(bytes(24)).cast("f"))
    assert (array.nbytes, scalar.nbytes, view.nbytes) == (12, 8, 24)
    assert Payload(kind="latents", arrays={"a": array, "b": array}).nbytes == 24


def test_an_array_whose_bytes_or_dtype_do_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"uint8 \(2,\) has a view that skips bytes; give a contiguous copy"):
        Array(dtype="uint8", shape=(2,), data=memoryview(b"abcd")[::2])
    with pytest.raises(ValueError, match=r"float32 \(2, 3\) needs 24 bytes, got 23"):
        Array(dtype="float32", shape=(2, 3), data=bytes(23))
    with pytest.raises(ValueError, match="'complex64' is not one of bool, uint8"):
        Array(dtype="complex64", shape=(), data=bytes(8))
