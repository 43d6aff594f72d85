"""Prompt templates."""

import re

import pytest

from cosmos_core.data import BadRowError
from cosmos_core.data.options import Template


def test_a_template_fills_fields_and_keeps_braces():
    template = Template("Q: {question} {{{number}}}\n")
    assert template.fill({"question": "{x}", "number": 2.5}) == "Q: {x} {2.5}\n"
    assert template.fields == {"question", "number"}

    # A placeholder never reaches into python.
    template = Template("{question.__class__}")
    assert template.fill({"question.__class__": "a field like any other"}) == "a field like any other"
    with pytest.raises(BadRowError, match="no field"):
        template.fill({"question": "x"})


def test_a_field_that_cannot_be_filled_in():
    for row, message in [
        ({"qestion": "x"}, "no field 'question'; did you mean 'qestion'?"),
        ({"a": 1, "b": 2}, "no field 'question'; it has 'a', 'b'"),
        ({}, "no field 'question'; it has none"),
        ({"question": None}, "field 'question' is null, not text"),
        ({"question": ["x"]}, "field 'question' is a list, not text"),
        ({"question": True}, "field 'question' is a bool, not text"),
    ]:
        with pytest.raises(BadRowError, match=re.escape(message)):
            Template("{question}").fill(row)
