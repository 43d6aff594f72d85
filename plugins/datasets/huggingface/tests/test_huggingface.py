"""Saved datasets and builders, images, and what cannot be loaded. Nothing here uses the network."""

import base64
import re
import subprocess
import sys

import datasets
import pytest

from cosmos_core.errors import DataError
from cosmos_core.protocols import DatasetContext
from cosmos_core.types import Message
from cosmos_dataset_huggingface import HuggingFaceDataset, HuggingFaceOptions

PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def saved(directory, rows, **options):
    table = rows if isinstance(rows, datasets.Dataset | datasets.DatasetDict) else datasets.Dataset.from_list(rows)
    table.save_to_disk(str(directory / "saved"))
    return load(directory, path="saved", **options)


def load(directory, **options):
    given = {"prompt": "{q}", **options}
    return HuggingFaceDataset(HuggingFaceOptions(**given), DatasetContext(seed=0, directory=directory))


def texts(dataset, split="train"):
    return [dataset.row(split, index).text for index in range(dataset.size(split))]


def test_a_lone_dataset_is_the_train_split(tmp_path):
    assert texts(saved(tmp_path, [{"q": "a", "x": 1}, {"q": "b", "x": 2}])) == ["a", "b"]


def test_chats_and_preferences(tmp_path):
    asked, good, bad = (
        {"role": role, "content": content} for role, content in (("user", "hi"), ("assistant", "x"), ("assistant", "y"))
    )
    row = saved(
        tmp_path,
        [{"chosen": [asked, good], "rejected": [asked, bad]}],
        prompt=None,
        messages="chosen",
        rejected_messages="rejected",
    ).row("train", 0)
    assert (row.text, row.demonstration, row.rejected) == ((Message(role="user", content="hi"),), "x", "y")


def test_images_stay_as_they_are_stored(tmp_path):
    (tmp_path / "a.png").write_bytes(PICTURE)
    table = datasets.Dataset.from_dict(
        {
            "q": ["a", "b"],
            "image": [{"bytes": PICTURE, "path": None}, {"bytes": None, "path": str(tmp_path / "a.png")}],
        },
        features=datasets.Features({"q": datasets.Value("string"), "image": datasets.Image()}),
    )
    dataset = saved(tmp_path, table, media="image")
    url = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"
    assert [dataset.row("train", index).media for index in (0, 1)] == [(url,), (url,)]  # it embeds files when it saves


def test_lists_of_images(tmp_path):
    features = datasets.Features({"q": datasets.Value("string"), "images": datasets.List(datasets.Image())})
    shown = [{"bytes": PICTURE, "path": None}] * 2
    dataset = saved(
        tmp_path, datasets.Dataset.from_dict({"q": ["a"], "images": [shown]}, features=features), media="images"
    )
    assert len(dataset.row("train", 0).media) == 2


def test_a_videos_bytes_are_refused(tmp_path):
    rows = [{"q": "a", "film": {"bytes": b"\0\0\0\x18ftypmp42", "path": None}}]
    with pytest.raises(DataError, match="saved:train:1: field 'film' has a video's bytes"):
        saved(tmp_path, rows, media="film")


def test_an_arrow_file_by_its_builder(tmp_path):
    rows = datasets.Dataset.from_list([{"q": "a"}, {"q": "b"}, {"q": "c"}])
    rows.save_to_disk(str(tmp_path / "kept"))
    (file,) = (tmp_path / "kept").glob("*.arrow")
    dataset = load(
        tmp_path, path="arrow", data_files={"train": [str(file)]}, split="train[:2]", heldout_split="train[2:]"
    )
    assert (texts(dataset), texts(dataset, "heldout")) == (["a", "b"], ["c"])


def test_bad_rows_are_refused_or_counted(tmp_path):
    rows = [{"q": "a"}, {"q": None}]
    with pytest.raises(DataError, match="saved:train:2: field 'q' is null, not text"):
        saved(tmp_path, rows)
    dataset = load(tmp_path, path="saved", on_bad_row="skip")
    assert (dataset.size("train"), dataset.omitted("train")[0].num_rows) == (1, 1)


def test_rows_that_are_checked_when_read_are_read_one_by_one(tmp_path, monkeypatch):
    dataset = saved(tmp_path, [{"q": str(n)} for n in range(5_000)], check_rows="when-read")
    table = dataset._splits["train"][0]._sources[0]
    read = []
    rows = table._rows
    monkeypatch.setattr(table, "_rows", lambda first, end: read.append((first, end)) or rows(first, end))
    assert dataset.row("train", 4_321).text == "4321"
    assert read == [(4_321, 4_322)]


def test_splits_that_are_not_there(tmp_path):
    with pytest.raises(DataError, match=r"no split 'test'; it has 'train'\. To hold rows out"):
        saved(tmp_path, [{"q": "a"}], heldout_split="test")


def test_what_cannot_be_loaded_says_what_to_check(tmp_path):
    with pytest.raises(DataError, match=r"split 'train' of 'nobody/nothing' cannot be loaded: .*check path, name"):
        load(tmp_path, path="nobody/nothing")
    with pytest.raises(DataError, match=r"split 'train' of 'parquet' cannot be loaded: "):
        load(tmp_path, path="parquet", data_files={"train": ["none.parquet"]})


def test_contradictions():
    with pytest.raises(ValueError, match=re.escape("at most one of `heldout_split`")):
        HuggingFaceOptions(path="x", prompt="{q}", heldout_split="test", heldout_rows=2)


@pytest.mark.nightly
def test_importing_it_imports_neither_torch_nor_datasets():
    code = "import cosmos_dataset_huggingface.plugin, sys; sys.exit(bool({'torch', 'datasets'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
