"""Values of fields."""

import datetime as dt
import difflib
import math
from pathlib import Path

import pytest

from cosmos_core.data import FieldOptions
from cosmos_core.data.mapping import FieldMapping, plain
from cosmos_core.data.rows import BadRowError
from cosmos_core.errors import DataError


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"prompt": "question"},
            r"option prompt = 'question' is the same .* mean \{question\}\? .* question, answer, image",
        ),
        ({"prompt": "questions"}, r"did you mean \{question\}\? Columns: question"),
        (
            {"prompt": "questions", "demonstration": "{answer}"},
            r"did you mean \{question\}\? If not, add a mark, as in 'questions\.'\. Columns: question",
        ),
        ({"prompt": "answer", "reference": "answer"}, r"did you mean \{answer\}\? If not"),
        ({"prompt": "answer", "demonstration": "{answer}", "media": "image"}, r"did you mean \{answer\}\? If not"),
        ({"prompt": "Tell me a joke."}, r"written in braces, as in \{question\}\. Columns: question"),
        (
            {"prompt": "{question}", "demonstration": "answer"},
            r"option demonstration = 'answer' is .* mean \{answer\}\?",
        ),
    ],
)
def test_a_column_without_braces_is_refused_with_the_columns_that_there_are(options, message):
    mapping = FieldMapping(FieldOptions(**options))
    row = {"question": "1 + 1?", "answer": "2", "image": "http://a.example/1.png"}
    read = {name: row[name] for name in row if name in mapping.fields} or row  # as a Parquet file does
    with pytest.raises(DataError, match=message):
        mapping.prompt(read, Path("/"))


@pytest.mark.parametrize(
    ("options", "read"),
    [
        ({"prompt": "What is it?", "demonstration": "{answer}", "media": "image"}, {"answer", "image", "What is it?"}),
        ({"prompt": "Write an answer.", "demonstration": "{answer}"}, {"answer", "Write an answer."}),
        ({"prompt": "Think of a question.", "reference": "answer"}, {"answer", "Think of a question."}),
        ({"prompt": "Question:", "metadata": ("answer",)}, {"answer", "Question:"}),
        ({"prompt": "Guess", "metadata": ("answer",)}, set()),
        ({"prompt": "Answer", "demonstration": "{answer}", "media": "image"}, set()),
        ({"prompt": "questions.", "demonstration": "{answer}"}, {"answer", "questions."}),
    ],
)
def test_a_prompt_that_is_the_same_in_every_row_is_taken_where_something_else_varies(options, read, monkeypatch):
    mapping = FieldMapping(FieldOptions(**options))
    row = {"question": "1 + 1?", "answer": "a cat", "image": "http://a.example/1.png"}
    assert mapping.prompt(row, Path("/")).text == options["prompt"]
    assert mapping.fields == read
    # Once, not row by row.
    monkeypatch.setattr(difflib, "get_close_matches", None)
    assert "a cat" in str(mapping.prompt(row, Path("/")))
