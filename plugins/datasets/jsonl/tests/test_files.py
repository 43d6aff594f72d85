"""JSONL and Parquet files as datasets, good and bad ones."""

import itertools
import json
import logging
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cosmos_core.errors import DataError
from cosmos_core.protocols import DatasetContext
from cosmos_core.types import Message, ToolCall
from cosmos_dataset_jsonl import FileDataset, JsonlOptions

ROWS = [{"question": f"{n} and {n}?", "answer": f"{n}+{n}\n#### {2 * n:,}"} for n in range(0, 2000, 100)]


def write(path, rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def make(directory, **options):
    given = {"train": "rows.jsonl", "prompt": "{question}\n", **options}
    return FileDataset(JsonlOptions(**given), DatasetContext(seed=0, directory=directory))


def texts(dataset, split="train"):
    return [dataset.row(split, index).text for index in range(dataset.size(split))]


def test_rows_become_prompts(tmp_path, subtests):
    for name in ["rows.jsonl", "rows.parquet"]:
        with subtests.test(name=name):
            write(tmp_path / name, ROWS)
            dataset = make(
                tmp_path, train=name, demonstration="{answer}", reference="answer", reference_pattern="#### (.+)"
            )
            assert dataset.size("train") == 20
            assert dataset.size("heldout") == 0
            prompt = dataset.row("train", 19)
            assert prompt.text == "1900 and 1900?\n"
            assert prompt.demonstration == "1900+1900\n#### 3,800"
            assert prompt.reference == "3,800"
            assert texts(dataset) == [f"{row['question']}\n" for row in ROWS]


def test_a_reference_keeps_its_type_without_a_pattern(tmp_path):
    write(tmp_path / "rows.jsonl", [{"question": "?", "answer": {"number": 4}}])
    assert make(tmp_path, reference="answer").row("train", 0).reference == {"number": 4}


def test_the_last_group_of_the_last_match_counts(tmp_path):
    write(tmp_path / "rows.jsonl", [{"question": "?", "answer": "a=1 b=2"}])
    assert make(tmp_path, reference="answer", reference_pattern=r"(\w)=(\d)").row("train", 0).reference == "2"
    assert make(tmp_path, reference="answer", reference_pattern=r"\w=\d").row("train", 0).reference == "b=2"


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path):
    content = '\n{"question": "a"}\n  \r\n{"question": "b"}\r\n\n{"question": "é"}'
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + content.encode())
    assert texts(make(tmp_path)) == ["a\n", "b\n", "é\n"]


def test_a_mark_before_the_first_row(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"question": "a"}\n')
    assert texts(make(tmp_path)) == ["a\n"]


BAD = [
    (b"{", "no JSON: Expecting property name enclosed in double quotes at column 2"),
    (b"[1]", "a row is an object of named fields, not a list"),
    (b'"x"', "a row is an object of named fields, not a str"),
    (b'{"question": 1', "no JSON"),
    (b'{"question": "\xff"}', "no UTF-8: byte 14 of the line"),
    (b'{"question": null}', "field 'question' is null, not text"),
    (b'{"quest": "x"}', "no field 'question'; did you mean 'quest'?"),
    (b"[" * 100_000, "JSON that cannot be read"),
]


def test_a_bad_row_in_the_middle_is_refused_with_file_line_and_reason(tmp_path, subtests):
    for line, reason in BAD:
        with subtests.test(line=line, reason=reason):
            path = tmp_path / "rows.jsonl"
            path.write_bytes(b'{"question": "a"}\n\n' + line + b'\n{"question": "b"}\n')
            with pytest.raises(DataError, match=re.escape(f"{path}:3: {reason}")):
                make(tmp_path)


def test_a_bad_row_is_skipped_counted_and_told(tmp_path, caplog, subtests):
    for line, reason in BAD:
        with subtests.test(line=line, reason=reason):
            path = tmp_path / "rows.jsonl"
            path.write_bytes(b'{"question": "a"}\n' + line + b'\n{"question": "b"}\n')
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                dataset = make(tmp_path, on_bad_row="skip")
            assert texts(dataset) == ["a\n", "b\n"]
            (omission,) = dataset.omitted("train")
            assert omission.num_rows == 1
            assert omission.first.startswith(f"{path}:2: {reason}")
            assert dataset.omitted("heldout") == ()
            assert "1 row(s) left out: " in caplog.text
            assert f"the first: {path}:2: {reason}" in caplog.text


def test_rows_that_cannot_be_mapped(tmp_path, subtests):
    for (options, row, reason), name in itertools.product(
        [
            ({"prompt": "{question}"}, {"question": "  "}, "the prompt is empty"),
            ({"demonstration": "{answer}"}, {"question": "x", "answer": ""}, "the demonstration is empty"),
            ({"reference": "answer"}, {"question": "x", "answer": None}, "field 'answer' is null"),
            (
                {"reference": "answer", "reference_pattern": "#### (.+)"},
                {"question": "x", "answer": "no number"},
                "field 'answer' has nothing that reference_pattern '#### (.+)' finds",
            ),
        ],
        ["rows.jsonl", "rows.parquet"],
    ):
        with subtests.test(options=options, row=row, reason=reason, name=name):
            good = {"question": "x", "answer": "#### 1"}
            write(tmp_path / name, [good, row])
            with pytest.raises(DataError, match=re.escape(f"{name}:2: {reason}")):
                make(tmp_path, train=name, **options)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_the_option_that_names_no_field_is_told(tmp_path, name):
    write(tmp_path / name, [{"question": "x"}, {"question": "y"}])
    for options, option in [({"prompt": "{qestion}"}, "prompt"), ({"reference": "nope"}, "reference")]:
        told = rf"1: no field '\w+'; .* \(dataset\.options\.{option} names it, and no row of the first 2 has it: mend"
        with pytest.raises(DataError, match=told):
            make(tmp_path, train=name, **{"prompt": "{question}"} | options)


def test_the_option_that_names_a_field_that_others_have_is_told(tmp_path):
    write(tmp_path / "rows.jsonl", [{"question": "x", "more": 1}, {"question": "y"}])
    with pytest.raises(
        DataError, match=r":2: no field 'more'; .* \(dataset\.options\.metadata names it; mend the row, or"
    ):
        make(tmp_path, train="rows.jsonl", prompt="{question}", metadata=["more"])


def test_parquet_without_the_columns(tmp_path):
    write(tmp_path / "rows.parquet", [{"quest": "x"}])
    with pytest.raises(DataError, match="no field 'question'; did you mean 'quest'"):
        make(tmp_path, train="rows.parquet")


def test_parquet_rows_are_found_across_batches(tmp_path):
    write(tmp_path / "rows.parquet", [{"question": str(number)} for number in range(9_000)])
    dataset = make(tmp_path, train="rows.parquet")
    for number in (0, 4_095, 4_096, 4_097, 8_191, 8_192, 8_999):
        assert dataset.row("train", number).text == f"{number}\n"


def test_a_file_without_rows(tmp_path, subtests):
    for content in ["", "\n\n"]:
        with subtests.test(content=content):
            path = tmp_path / "rows.jsonl"
            path.write_text(content)
            with pytest.raises(DataError, match=re.escape(f"{path}: empty; give a source that has rows")):
                make(tmp_path)


def test_only_bad_rows(tmp_path):
    (tmp_path / "rows.jsonl").write_text("x\ny\n")
    with pytest.raises(DataError, match=r"no usable rows \(2 skipped: 2 x no JSON\)"):
        make(tmp_path, on_bad_row="skip")


def test_files_that_are_not_there_or_no_parquet(tmp_path):
    with pytest.raises(DataError, match=re.escape(f"dataset.options.train: no file at {tmp_path / 'rows.jsonl'}")):
        make(tmp_path)
    write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(DataError, match=r"dataset.options.heldout: no file at .*none-\*\.jsonl"):
        make(tmp_path, heldout="none-*.jsonl")
    (tmp_path / "bad.parquet").write_text("x")
    with pytest.raises(DataError, match=r"bad\.parquet: no readable Parquet file"):
        make(tmp_path, train="bad.parquet")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    write(tmp_path / "rows.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=re.escape("pip install 'cosmos-dataset-jsonl[parquet]'")):
        make(tmp_path, train="rows.parquet")


def test_several_files_by_glob_in_order(tmp_path):
    write(tmp_path / "b.jsonl", ROWS[:3])
    write(tmp_path / "a.jsonl", ROWS[3:5])
    assert texts(make(tmp_path, train="*.jsonl")) == [f"{row['question']}\n" for row in (*ROWS[3:5], *ROWS[:3])]


def test_environment_variables_in_paths(tmp_path, monkeypatch):
    write(tmp_path / "rows.jsonl", ROWS)
    monkeypatch.delenv("COSMOS_TEST_FOLDER", raising=False)
    with pytest.raises(DataError, match="the environment variable COSMOS_TEST_FOLDER is not set"):
        make(Path("/"), train="${COSMOS_TEST_FOLDER}/rows.jsonl")
    assert make(Path("/"), train=f"${{COSMOS_TEST_FOLDER:-{tmp_path}}}/rows.jsonl").size("train") == 20
    monkeypatch.setenv("COSMOS_TEST_FOLDER", str(tmp_path))
    assert make(Path("/"), train="${COSMOS_TEST_FOLDER:-nowhere}/rows.jsonl").size("train") == 20


def test_rows_held_out_of_one_file_are_disjoint_and_fixed(tmp_path, subtests):
    for options, held in [({"heldout_rows": 5}, 5), ({"heldout_fraction": 0.1}, 2)]:
        with subtests.test(options=options, held=held):
            write(tmp_path / "rows.jsonl", ROWS)
            dataset = make(tmp_path, **options)
            train, heldout = texts(dataset), texts(dataset, "heldout")
            assert len(heldout) == held
            assert sorted(train + heldout) == sorted(f"{row['question']}\n" for row in ROWS)
            other = FileDataset(
                JsonlOptions(train="rows.jsonl", prompt="{question}\n", **options),
                DatasetContext(seed=7, directory=tmp_path),
            )
            assert texts(other, "heldout") == heldout


def test_holding_everything_out_is_refused(tmp_path):
    write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(DataError, match="cannot hold 20 rows out of 20"):
        make(tmp_path, heldout_rows=20)


def test_a_heldout_file_of_its_own(tmp_path):
    write(tmp_path / "rows.jsonl", ROWS[:15])
    write(tmp_path / "test.parquet", ROWS[15:])
    dataset = make(tmp_path, heldout="test.parquet")
    assert (dataset.size("train"), dataset.size("heldout")) == (15, 5)
    assert dataset.row("heldout", 4).text == "1900 and 1900?\n"


def test_a_number_out_of_range_is_told_with_the_size(tmp_path):
    write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(IndexError, match="row 20 of split 'train', which has 20"):
        make(tmp_path).row("train", 20)


def test_a_prompt_as_a_chat(tmp_path):
    write(tmp_path / "rows.jsonl", ROWS[:1])
    turns = (Message(role="system", content="Be brief."), Message(role="user", content="0 and 0?"))
    assert make(tmp_path, prompt="{question}", chat=True, system="Be brief.").row("train", 0).text == turns
    assert make(tmp_path, prompt="{question}", chat=True).row("train", 0).text == turns[1:]


def test_chats(tmp_path, subtests):
    for name in ["rows.jsonl", "rows.parquet"]:
        with subtests.test(name=name):
            user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
            write(tmp_path / name, [{"turns": [user, answer]}, {"turns": [user, answer, user]}])
            dataset = make(tmp_path, train=name, prompt=None, messages="turns", system="s")
            first, second = dataset.row("train", 0), dataset.row("train", 1)
            assert first.text == (Message(role="system", content="s"), Message(role="user", content="hi"))
            assert first.demonstration == "hello"
            assert [turn.role for turn in second.text] == ["system", "user", "assistant", "user"]
            assert second.demonstration is None


def called(arguments):
    return {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}


ASKED, CALL = {"role": "user", "content": "1 and 2?"}, called('{"x":  1}')
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def test_chats_with_tools(tmp_path):
    turns = [
        ASKED,
        {"role": "assistant", "content": None, "tool_calls": [CALL, called({"x": 2})], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    rows = [
        {"turns": turns, "tools": [TOOL]},
        {"turns": turns, "tools": json.dumps([TOOL])},
        {"turns": turns[:1], "tools": None},
    ]
    write(tmp_path / "rows.jsonl", rows)
    dataset = make(tmp_path, prompt=None, messages="turns", tools="tools")
    first, second, third = (dataset.row("train", index) for index in range(3))
    assert first == second
    assert (first.tools, third.tools) == ((TOOL,), ())
    calls = tuple(ToolCall(name="add", arguments=arguments, id="c1") for arguments in ('{"x":  1}', '{"x": 2}'))
    assert first.text[1:] == (
        Message(role="assistant", content="", tool_calls=calls, reasoning="Hm."),
        Message(role="tool", content="3", tool_call_id="c1"),
    )
    for bad, reason in [
        ("{", "no JSON"),
        ({"add": 1}, "give a list"),
        ([TOOL, TOOL], "tool 2 is named 'add', and so is"),
    ]:
        write(tmp_path / "rows.jsonl", [{"turns": turns, "tools": bad}])
        with pytest.raises(DataError, match=f"field 'tools'.*{reason}"):
            make(tmp_path, prompt=None, messages="turns", tools="tools")


def test_bad_chats(tmp_path, subtests):
    for turns, reason in [
        ([], "no list of turns"),
        ("hi", "no list of turns"),
        ([{"role": "user"}], "turn 1 has no text for both `role` and `content`"),
        ([{"role": "user", "content": "x"}, 3], "turn 2 has no text"),
        ([{"role": "assistant", "content": "x"}], "has an answer, but nothing before it"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "turn 1 is of 'user' and has `tool_calls`"),
        ([ASKED, {"role": "assistant", "tool_calls": [{}]}], "turn 2: call 1 is {}; give"),
        ([ASKED, {"role": "assistant", "tool_calls": [called("{")]}], "turn 2: call 1 of 'add': .*'{', no JSON"),
        ([ASKED, {"role": "assistant", "tool_calls": [called("[1]")]}], "give the JSON text of an object"),
        ([ASKED, {"role": "assistant", "tool_calls": [CALL]}], "ends with a call of a tool; a demonstration is text"),
        ([ASKED, {"role": "tool", "content": "3", "tool_call_id": 1}], "turn 2: tool_call_id and"),
    ]:
        with subtests.test(turns=turns, reason=reason):
            write(tmp_path / "rows.jsonl", [{"turns": turns}])
            with pytest.raises(DataError, match=reason):
                make(tmp_path, prompt=None, messages="turns")


def test_a_file_that_changed_is_told(tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    dataset = make(tmp_path)
    path.write_text('{"q": 1}\n' * 200)
    with pytest.raises(DataError, match="it changed since the run began"):
        dataset.row("train", 0)
    path.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        dataset.row("train", 3)


@pytest.mark.nightly
def test_memory_stays_small(tmp_path):
    """40,000 rows of 500 bytes are 20 MB; what stays is their places."""
    write(tmp_path / "rows.jsonl", [{"question": "x" * 480, "number": number} for number in range(40_000)])
    tracemalloc.start()
    dataset = make(tmp_path)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert dataset.size("train") == 40_000
    assert kept < 1_500_000


def test_importing_it_imports_neither_torch_nor_pyarrow():
    code = "import cosmos_dataset_jsonl.plugin, sys; sys.exit(bool({'torch', 'pyarrow'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
