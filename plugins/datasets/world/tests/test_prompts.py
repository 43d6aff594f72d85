"""Prompts alone."""

import pytest

from cosmos_core.errors import DataError
from cosmos_core.plugins.recipe import dataset_context
from cosmos_core.plugins.selection import PluginSet


@pytest.fixture
def made(tmp_path):
    def make(**options):
        plugins = PluginSet.load([("dataset", "world-prompts")])
        return plugins.create("dataset", "world-prompts", options, dataset_context(plugins, 0, tmp_path))

    return make


def test_a_line_is_a_prompt(made, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa {red} cat\r\n\n  a dog \n" + "eine Kuh aus Köln".encode())
    dataset = made(train="a.txt")
    assert [dataset.row("train", index).text for index in range(dataset.size("train"))] == [
        "a {red} cat",
        "a dog",
        "eine Kuh aus Köln",
    ]
    assert dataset.row("train", 0).media == ()


def test_a_line_that_is_no_text_is_refused_or_counted(made, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a cat\n\xff\xfe\n")
    with pytest.raises(DataError, match=r"a.txt:2: no UTF-8: byte 0 of the line"):
        made(train="a.txt")
    dataset = made(train="a.txt", on_bad_row="skip")
    assert dataset.size("train") == 1
    assert [each.reason for each in dataset.omitted("train")] == ["no UTF-8"]
    with pytest.raises(DataError, match="no UTF-8: byte 0 of the line"):
        made(train="a.txt", check_rows="when-read").row("train", 1)


def test_a_row_has_what_its_fields_are(made, tmp_path):
    (tmp_path / "first.png").write_bytes(b"picture")
    (tmp_path / "a.jsonl").write_text(
        '{"caption": "a cat", "colour": [1, 2, 3], "image": "first.png", "from": "here"}\n{"caption": "a dog"}\n'
    )
    fields = {"field": "caption", "reference": "colour", "media": "image", "metadata": ["from"]}
    dataset = made(train="a.jsonl", given_frames=2, on_bad_row="skip", **fields)
    row = dataset.row("train", 0)
    assert (row.text, row.reference, row.media) == ("a cat", [1, 2, 3], (str(tmp_path / "first.png"),))
    assert row.metadata == {"from": "here", "num_given_frames": 2}
    assert [each.reason for each in dataset.omitted("train")] == ["no field 'colour'"]
    assert made(train="a.jsonl", field="caption").row("train", 1).metadata == {}
