"""Rows with a completion that is preferred to another."""

import json

import pytest

from cosmos_core.errors import DataError
from cosmos_core.protocols import DatasetContext
from cosmos_core.types import Message
from cosmos_dataset_jsonl import FileDataset, JsonlOptions

ROW = {"q": "2 + 2?", "good": "4", "bad": "5"}
TEXT = {"prompt": "{q}", "demonstration": "{good}", "rejected": "{bad}"}
ASKED = {"role": "user", "content": "2 + 2?"}
CHATS = {"messages": "chosen", "rejected_messages": "worse"}


def read(directory, row, **options):
    (directory / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return FileDataset(JsonlOptions(train="rows.jsonl", **options), DatasetContext(seed=0, directory=directory)).row(
        "train", 0
    )


def said(content):
    return {"role": "assistant", "content": content}


def test_a_pair_of_texts(tmp_path):
    row = read(tmp_path, ROW, **TEXT)
    assert (row.text, row.demonstration, row.rejected) == ("2 + 2?", "4", "5")


def test_a_pair_of_chats_shares_what_was_asked(tmp_path):
    row = read(tmp_path, {"chosen": [ASKED, said("4")], "worse": [ASKED, said("5")]}, system="Count.", **CHATS)
    assert row.text == (Message(role="system", content="Count."), Message(role="user", content="2 + 2?"))
    assert (row.demonstration, row.rejected) == ("4", "5")


def test_a_chat_with_a_rejected_text(tmp_path):
    row = read(tmp_path, {"chosen": [ASKED, said("4")], "bad": "5"}, messages="chosen", rejected="{bad}")
    assert (row.demonstration, row.rejected) == ("4", "5")


def test_pairs_that_are_none(tmp_path, subtests):
    for row, options, reason in [
        (ROW | {"bad": "4"}, TEXT, "the rejected completion is the demonstration itself"),
        (ROW | {"bad": " "}, TEXT, "the rejected completion is empty"),
        ({"q": "?", "good": "4"}, TEXT, "no field 'bad'"),
        ({"chosen": [ASKED], "worse": [ASKED, said("5")]}, CHATS, "no demonstration that is preferred to it"),
        ({"chosen": [ASKED, said("4")], "worse": [ASKED]}, CHATS, "'worse' does not end with a turn of the assistant"),
        (
            {"chosen": [ASKED, said("4")], "worse": [{**ASKED, "content": "3 + 3?"}, said("5")]},
            CHATS,
            "field 'worse' is another chat than 'chosen' before its last turn",
        ),
    ]:
        with (
            subtests.test(row=row, options=options, reason=reason),
            pytest.raises(DataError, match=f"rows.jsonl:1: .*{reason}"),
        ):
            read(tmp_path, row, **options)
