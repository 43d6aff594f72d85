"""Rows that show images or videos."""

import base64
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cosmos_core.errors import DataError
from cosmos_core.protocols import DatasetContext
from cosmos_dataset_jsonl import FileDataset, JsonlOptions


@pytest.fixture
def folder(tmp_path):
    data = tmp_path / "data"
    (data / "pictures").mkdir(parents=True)
    (data / "film").mkdir()
    for name in ("a.png", "b.png"):
        (data / "pictures" / name).write_bytes(b"picture")
    return data


def read(folder, rows, **options):
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": "What?", **row}) + "\n" for row in rows))
    settings = {"train": "data/rows.jsonl", "prompt": "{text}", "media": "shown", **options}
    return FileDataset(JsonlOptions(**settings), DatasetContext(seed=0, directory=folder.parent))


def test_paths_are_relative_to_the_folder_of_the_file(folder):
    rows = [{"shown": ["pictures/a.png", "film"]}, {"shown": "pictures/b.png"}, {"shown": []}, {"shown": None}]
    dataset = read(folder, rows)
    assert [dataset.row("train", index).media for index in range(4)] == [
        (str(folder / "pictures" / "a.png"), str(folder / "film")),
        (str(folder / "pictures" / "b.png"),),
        (),
        (),
    ]


def test_urls_and_absolute_paths_stay_as_they_are(folder):
    given = [str(folder / "film"), "data:image/png;base64,AAAA", "file:///nowhere.png", "https://example.org/a.png"]
    assert read(folder, [{"shown": given}]).row("train", 0).media == tuple(given)


def test_a_path_that_does_not_exist_is_told_with_its_row(folder):
    rows = [{"shown": []}, {"shown": ["pictures/a.png", "pictures/c.png"]}]
    with pytest.raises(
        DataError, match=r"rows\.jsonl:2: field 'shown' names 'pictures/c\.png', and there is no /.*c\.png"
    ):
        read(folder, rows)
    dataset = read(folder, rows, on_bad_row="skip")
    assert dataset.size("train") == 1
    assert [each.reason for each in dataset.omitted("train")] == ["field 'shown' names a file that does not exist"]


def test_what_is_no_location_is_refused(folder, subtests):
    for value in [3, [""], [None], [["a"]], {"bytes": "text"}]:
        with (
            subtests.test(value=value),
            pytest.raises(DataError, match=r"rows\.jsonl:1: field 'shown' has .*, not the location"),
        ):
            read(folder, [{"shown": value}])


def test_what_can_be_no_path_is_an_error_of_its_row(folder, subtests):
    (folder / "loop.png").symlink_to(folder / "loop.png")
    for value in ["iVBORw0KGgo" * 500, "~nobody-here/a.png", "a\0.png", "loop.png"]:
        with subtests.test(value=value):
            rows = [{"shown": "pictures/a.png"}, {"shown": [value]}]
            with pytest.raises(DataError, match=r"rows\.jsonl:2: field 'shown' (has|names) '"):
                read(folder, rows)
            dataset = read(folder, rows, on_bad_row="skip")
            assert (dataset.size("train"), [each.num_rows for each in dataset.omitted("train")]) == (1, [1])


def test_a_row_without_the_field_is_refused(folder):
    with pytest.raises(DataError, match=r"rows\.jsonl:1: no field 'shown'"):
        read(folder, [{}])


def test_images_inside_parquet_become_data_urls(folder):
    shown = [[{"bytes": b"picture", "path": None}, {"bytes": None, "path": "pictures/a.png"}]]
    pq.write_table(pa.table({"text": ["What?"], "shown": shown}), folder / "rows.parquet")
    options = JsonlOptions(train="rows.parquet", prompt="{text}", media="shown")
    row = FileDataset(options, DatasetContext(seed=0, directory=folder)).row("train", 0)
    assert row.media == (
        f"data:image/png;base64,{base64.b64encode(b'picture').decode()}",
        str(folder / "pictures" / "a.png"),
    )
