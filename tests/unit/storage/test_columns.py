"""Columns are what pyarrow itself would make of the same values, and pandas is not imported for them."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from cosmos_core.storage.columns import column

F4, I4 = (lambda *values: np.array(values, np.float32)), (lambda *values: np.array(values, np.int32))


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.int64(), [1, -(2**62), None]),
        (pa.int32(), [7]),
        (pa.float64(), [0.1, None, float("nan"), float("-inf")]),
        (pa.bool_(), [True, None, False, *[True] * 9]),
        (pa.string(), ["", "naïve 🙂", None, "x"]),
        (pa.list_(pa.int32()), [I4(1, 2), None, I4(), I4(3)]),
        (pa.list_(pa.float32()), [F4(0.5), [None, -1.5], None, []]),
        (pa.list_(pa.float32()), [F4(0.1, 0.2)[::2], F4(float("nan"))]),
        (pa.list_(pa.string()), [["a", "b"], [], None]),
        (pa.list_(pa.list_(pa.float32())), [[F4(1.0), None], None, [F4(), F4(2.0, 3.0)]]),
        (pa.list_(pa.bool_()), [[True, False], [], None]),
        (pa.map_(pa.string(), pa.float64()), [[("math", 1.0), ("length", None)], None, []]),
        (pa.string(), []),
        (pa.list_(pa.int32()), [None, None]),
    ],
    ids=str,
)
def test_a_column_is_what_pyarrow_makes_of_the_values(kind, values):
    made = column(kind, values)
    made.validate(full=True)
    assert made.type == kind
    expected = pa.array(values, kind)
    # Values that are no numbers are not equal to themselves.
    assert str(made) == str(expected)
    assert made.null_count == expected.null_count


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *((pa.int32(), 2**40), (pa.int64(), "one"), (pa.int64(), 1.5), (pa.string(), 3), (pa.list_(pa.int32()), 5)),
        *((pa.list_(pa.int32()), np.array([2**40])), (pa.list_(pa.int32()), F4(1.5))),
        (pa.list_(pa.int32()), np.array([1, 2**31 + 5], np.uint32)),
    ],
)
def test_a_value_of_another_kind_is_refused(kind, value):
    with pytest.raises((OverflowError, ValueError, AttributeError, TypeError)):
        column(kind, [value])


def test_pandas_is_not_imported(tmp_path):
    code = """
import sys, time
from pathlib import Path
import pyarrow as pa
from cosmos_core.rollout.samples import schema
from cosmos_core.storage.parts import PartWriter
writer = PartWriter(Path(sys.argv[1]), "samples", "rollout-0", schema, 1 << 20)
writer.put([{"lease": 1, "index": 0, "prompt": "p", "rewards": [("math", 1.0)], "units": [1], "prompt_media": []}], 99)
writer.close()
assert [*Path(sys.argv[1]).iterdir()]
sys.exit("pandas" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
