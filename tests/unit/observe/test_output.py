"""Output whose reader goes away."""

import os
from pathlib import Path

import pytest

from cosmos_core.observe.output import Output


def test_what_nobody_reads_is_lost_and_nothing_fails():
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        output = Output(stream)
        assert output.write("first") == 5
        output.flush()
        assert os.read(reading, 9) == b"first"
        os.close(reading)
        assert output.write("second") == 6
        output.flush()
        output.write("third")
        output.flush()

    # All else is the streams.
    with Path(os.devnull).open("w") as stream:
        assert (Output(stream).fileno(), Output(stream).encoding) == (stream.fileno(), stream.encoding)


def test_other_failures_are_told():
    with Path("/dev/full").open("w") as stream:
        output = Output(stream)
        output.write("x")
        with pytest.raises(OSError, match="No space left"):
            output.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
