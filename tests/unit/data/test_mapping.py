"""Values of fields."""

import datetime as dt
import math

import pytest

from cosmos_core.data.mapping import plain
from cosmos_core.data.rows import BadRowError


def test_values_are_what_json_can_hold():
    # What json can hold stays as it is.
    for value in [None, True, 3, 0.5, "a", [1, {"a": [None]}], {}]:
        assert plain(value, "x") is value

    # What json cannot hold is refused at any depth.
    for value, message in [
        (math.nan, "field 'x' is nan"),
        ([1.0, math.inf], "field 'x' has in it inf"),
        (b"a", "field 'x' is a bytes"),
        ([dt.date(2020, 1, 1)], "field 'x' has in it a date"),
        ({"a": [{"b": b"c"}]}, "field 'x' has in it a bytes"),
        ({(1, 2): "a"}, "field 'x' has in it a tuple"),
    ]:
        with pytest.raises(BadRowError, match=f"{message}, which JSON cannot hold"):
            plain(value, "x")
