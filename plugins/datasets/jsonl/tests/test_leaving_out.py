"""Rows that are left out are counted by reason, and lengths are measured in characters."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cosmos_core.errors import DataError
from cosmos_core.protocols import DatasetContext
from cosmos_core.protocols.dataset import Omission
from cosmos_dataset_jsonl import FileDataset, JsonlOptions
from cosmos_dataset_jsonl import parquet as parquet_module


def read(directory, rows, **options):
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"train": "rows.jsonl", "prompt": "{q}", **options}
    return FileDataset(JsonlOptions(**given), DatasetContext(seed=0, directory=directory))


def test_rows_are_counted_by_reason_the_most_frequent_first(tmp_path):
    rows = [{"q": "a"}, {"q": None}, {"x": 1}, {"q": None}]
    dataset = read(tmp_path, rows, on_bad_row="skip")
    assert dataset.size("train") == 1
    assert dataset.omitted("train") == (
        Omission(
            reason="field 'q' is null, not text",
            num_rows=2,
            first=f"{tmp_path}/rows.jsonl:2: field 'q' is null, not text",
        ),
        Omission(reason="no field 'q'", num_rows=1, first=f"{tmp_path}/rows.jsonl:3: no field 'q'; it has 'x'"),
    )


def test_a_reason_is_logged_once_however_many_rows_it_has(tmp_path, caplog):
    read(tmp_path, [{"q": "a"}, *[{"q": None}] * 500], on_bad_row="skip")
    (record,) = caplog.records
    assert record.message.startswith("500 row(s) left out: field 'q' is null, not text; the first: ")


def test_lengths_count_all_that_is_trained_on_and_refuse_nothing(tmp_path):
    rows = [{"q": "x" * size, "a": "yy"} for size in (1, 2, 3, 4, 5)]
    dataset = read(tmp_path, rows, demonstration="{a}", min_characters=4, max_characters=6)
    assert [len(dataset.row("train", index).text) for index in range(dataset.size("train"))] == [2, 3, 4]
    assert {(each.reason, each.num_rows) for each in dataset.omitted("train")} == {
        ("below min_characters", 1),
        ("above max_characters", 1),
    }


def test_each_split_counts_its_own(tmp_path):
    (tmp_path / "test.jsonl").write_text('{"q": "b"}\n{"q": ""}\n')
    dataset = read(tmp_path, [{"q": "a"}], heldout="test.jsonl", on_bad_row="skip")
    assert dataset.omitted("train") == ()
    assert [each.num_rows for each in dataset.omitted("heldout")] == [1]


def test_rows_that_are_checked_when_read(tmp_path, subtests):
    for name in ["rows.jsonl", "rows.parquet"]:
        with subtests.test(name=name):
            rows = [{"q": "a"}, {"q": None}, {"q": "c"}]
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
            dataset = read(tmp_path, rows, train=name, check_rows="when-read")
            assert (dataset.size("train"), dataset.omitted("train")) == (3, ())
            assert dataset.row("train", 2).text == "c"
            with pytest.raises(DataError, match=rf"{name}: row 1: field 'q' is null, not text$"):
                dataset.row("train", 1)


def test_what_is_checked_when_read_reads_only_what_it_needs(tmp_path, monkeypatch):
    pq.write_table(pa.table({"q": [str(n) for n in range(100)]}), tmp_path / "rows.parquet", row_group_size=10)
    loaded = []
    kind = parquet_module.ParquetFile
    load = kind._load
    monkeypatch.setattr(kind, "_load", lambda self, group: loaded.append(group) or load(self, group))
    dataset = read(tmp_path, [], train="rows.parquet", check_rows="when-read")
    assert [dataset.row("train", index).text for index in (95, 7, 99)] == ["95", "7", "99"]
    assert loaded == [9, 0]


def test_row_groups_beyond_the_budget_are_let_go(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_module, "CACHE_BYTES", 1_000)
    pq.write_table(pa.table({"q": ["x" * 99 + str(n) for n in range(40)]}), tmp_path / "rows.parquet", row_group_size=4)
    file = parquet_module.ParquetFile(tmp_path / "rows.parquet", frozenset({"q"}))
    assert [file.read(number)["q"][99:] for number in (0, 39, 20, 1)] == ["0", "39", "20", "1"]
    assert len(file._groups) == 2


def test_metadata_is_carried_and_has_to_be_json(tmp_path):
    assert read(tmp_path, [{"q": "a", "level": 3}], metadata=["level"]).row("train", 0).metadata == {"level": 3}
    pq.write_table(pa.table({"q": ["a"], "level": [b"x"]}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="field 'level' is a bytes, which JSON cannot hold"):
        read(tmp_path, [], train="rows.parquet", metadata=["level"])
