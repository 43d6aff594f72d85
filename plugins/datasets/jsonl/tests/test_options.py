"""Options that contradict one another are refused before any file is read."""

import re

import pytest

from cosmos_dataset_jsonl import JsonlOptions
from cosmos_dataset_jsonl.rows import BadRowError
from cosmos_dataset_jsonl.template import Template


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({}, "give either `prompt`"),
        ({"prompt": "{q}", "messages": "m"}, "give either `prompt`"),
        ({"prompt": "{q}", "heldout": "x", "heldout_rows": 2}, "at most one of"),
        ({"prompt": "{q}", "reference_pattern": "x"}, "needs `reference`"),
        ({"prompt": "{q}", "system": "s"}, "needs `chat = true`"),
        ({"prompt": "{}"}, "name of a field"),
        ({"prompt": "{q:>10}"}, "name of a field"),
        ({"prompt": "{q!r}"}, "name of a field"),
        ({"prompt": "{q"}, "prompt: "),
        ({"prompt": "{q}", "reference": "a", "reference_pattern": "("}, "no regular expression"),
        ({"prompt": "{q}", "heldout_fraction": 1.0}, "heldout_fraction"),
        ({"prompt": "{q}", "heldout_rows": 0}, "heldout_rows"),
    ],
)
def test_contradictions(bad, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        JsonlOptions(train="x.jsonl", **bad)


def test_a_template_fills_fields_and_keeps_braces():
    template = Template("Q: {question} {{{number}}}\n")
    assert template.fill({"question": "{x}", "number": 2.5}) == "Q: {x} {2.5}\n"
    assert template.fields == {"question", "number"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"qestion": "x"}, "no field 'question'; did you mean 'qestion'?"),
        ({"a": 1, "b": 2}, "no field 'question'; it has 'a', 'b'"),
        ({}, "no field 'question'; it has none"),
        ({"question": None}, "field 'question' is null, not text"),
        ({"question": ["x"]}, "field 'question' is a list, not text"),
        ({"question": True}, "field 'question' is a bool, not text"),
    ],
)
def test_a_field_that_cannot_be_filled_in(row, message):
    with pytest.raises(BadRowError, match=re.escape(message)):
        Template("{question}").fill(row)


def test_a_placeholder_never_reaches_into_python():
    template = Template("{question.__class__}")
    assert template.fill({"question.__class__": "a field like any other"}) == "a field like any other"
    with pytest.raises(BadRowError, match="no field"):
        template.fill({"question": "x"})
