import pytest

from cosmos_core.types import Array, Payload


def test_an_array_knows_its_size() -> None:
    array = Array(dtype="bfloat16", shape=(2, 3), data=bytes(12))
    assert array.nbytes == 12
    assert Payload(kind="latents", arrays={"a": array, "b": array}).nbytes == 24


def test_an_array_whose_bytes_do_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"float32 \(2, 3\) needs 24 bytes, got 23"):
        Array(dtype="float32", shape=(2, 3), data=bytes(23))


def test_a_view_is_measured_in_bytes_not_items() -> None:
    view = memoryview(bytes(24)).cast("f")
    assert Array(dtype="float32", shape=(6,), data=view).nbytes == 24


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="'complex64' is not one of bool, uint8"):
        Array(dtype="complex64", shape=(), data=bytes(8))


def test_a_scalar_has_one_item() -> None:
    assert Array(dtype="int64", shape=(), data=bytes(8)).nbytes == 8
