"""Folders of models, put in place of what is there: whole, and nothing of others is touched."""

import shutil
from pathlib import Path

import pytest

from cosmos_core.errors import StorageError
from cosmos_core.storage import check_place, fetch_model, file_system, move_folder, send_folder
from cosmos_core.storage.models import LIST
from tests.unit.storage.conftest import URL, contents


def test_a_model_is_sent_in_the_place_of_the_one_before(store, model, tmp_path):
    for url in (URL, f"file://{tmp_path}/sent"):
        send_folder(model, url)
        assert contents(fetch_model(url)) == contents(model)
    (model / "a.safetensors").rename(model / "b.safetensors")
    send_folder(model, URL)
    assert contents(fetch_model(URL)) == contents(model)

    # A folder that is no model is not sent.
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"is no model: it has neither config.json nor model_index.json"):
        send_folder(tmp_path, URL)


def test_files_of_others_stay(store, model):
    """The name of one file is no proof of an export, and what no export wrote is not its to remove."""
    files, root = file_system(URL)
    files.pipe_file(f"{root}/a.safetensors", b"mine")
    files.pipe_file(f"{root}/videos/a.mp4", b"film")
    with pytest.raises(StorageError, match="exists and is no exported model"):
        send_folder(model, URL)
    files.rm_file(f"{root}/a.safetensors")
    files.pipe_file(f"{root}/config.json", b"{}")
    for name in ("old-1.safetensors", "other/old-1.safetensors"):
        folder = f"{root}/{name}".rpartition("/")[0]
        files.pipe_file(f"{root}/{name}", b"weights")
        files.pipe_file(f"{folder}/old.safetensors.index.json", b'{"weight_map": {"w": "old-1.safetensors"}}')
    send_folder(model, URL)
    send_folder(model, URL)
    others = {"videos/a.mp4", "other/old-1.safetensors", "other/old.safetensors.index.json"}
    assert set(contents(fetch_model(URL))) == set(contents(model)) | others


def test_a_model_is_moved_by_the_same_rules(model, tmp_path):
    target = tmp_path / "moved"
    expected = contents(model)
    move_folder(model, target)
    assert contents(target) == {**expected, LIST: "".join(f"{name}\n" for name in sorted(expected))}
    assert contents(model) == {}
    (target / "notes.md").write_text("mine")
    (tmp_path / "weights").write_text("of others")
    (target / "a.safetensors").unlink()
    (target / "a.safetensors").symlink_to(tmp_path / "weights")
    for name in ("a.safetensors", "model_index.json"):
        (model / name).write_text("newer")
    move_folder(model, target)
    found = contents(target)
    assert found.pop(LIST).split() == ["a.safetensors", "model_index.json"]
    assert found == {"a.safetensors": "newer", "model_index.json": "newer", "notes.md": "mine"}
    assert (tmp_path / "weights").read_text() == "of others"


def test_a_model_is_not_moved_among_files_of_others(model, tmp_path):
    target = tmp_path / "moved"
    target.mkdir()
    check_place(target)
    (target / "notes.md").write_text("mine")
    for refused in (lambda: check_place(target), lambda: move_folder(model, target)):
        with pytest.raises(StorageError, match=r"moved exists and is no exported model; choose another place"):
            refused()
    (target / "config.json").write_text("of others")
    (target / "b.safetensors").write_text("of others")
    with pytest.raises(StorageError, match=r"has b\.safetensors, which no export wrote and no index names"):
        move_folder(model, target)
    assert contents(target) == {"notes.md": "mine", "config.json": "of others", "b.safetensors": "of others"}


def test_links_are_files_of_the_model_that_is_replaced_and_what_they_lead_to_stays(model, snapshot):
    expected, blobs = contents(model), contents(snapshot.with_name("blobs"))
    another = shutil.copytree(snapshot, snapshot.with_name("another"), symlinks=True)
    send_folder(model, f"file://{snapshot}")
    move_folder(model, another)
    for replaced in (snapshot, another):
        found = contents(replaced)
        assert found.pop(LIST).splitlines() == sorted(expected)
        assert found == expected
        assert not [path for path in replaced.rglob("*") if path.is_symlink()]
    assert contents(snapshot.with_name("blobs")) == blobs


def test_links_to_weights_of_others_are_weights_of_others(model, snapshot):
    for name in (LIST, "old.safetensors.index.json"):
        (snapshot / name).unlink()
    with pytest.raises(StorageError, match=r"has old\.safetensors, which no export wrote and no index names"):
        move_folder(model, snapshot)
    assert (snapshot / "config.json").is_symlink()


def test_what_is_in_the_way_of_a_folder_is_told_before_anything_changes(model, tmp_path):
    target, others = tmp_path / "moved", tmp_path / "others"
    others.mkdir()
    (others / "config.json").write_text("of others")
    move_folder(model, target)
    for name in ("config.json", "transformer/config.json"):
        (model / name).write_text("newer")
    (target / "transformer" / "config.json").unlink()
    (target / "transformer").rmdir()
    for put, message in [
        (lambda at: at.symlink_to(others), "is a link to another folder; remove it, or choose another place"),
        (lambda at: at.write_text("mine"), "is no folder, and the model has one there; remove it, or choose"),
    ]:
        put(target / "transformer")
        before = contents(target)
        with pytest.raises(StorageError, match=f"moved/transformer {message}"):
            move_folder(model, target)
        assert contents(target) == before
        assert contents(others) == {"config.json": "of others"}
        (target / "transformer").unlink()


def test_a_folder_in_the_place_of_a_file_is_told_before_anything_changes(model, tmp_path):
    target = tmp_path / "moved"
    (target / "a.safetensors").mkdir(parents=True)
    (target / "config.json").write_text("of others")
    with pytest.raises(StorageError, match=r"a\.safetensors is a folder, and the model has a file there; remove it"):
        move_folder(model, target)
    assert contents(target) == {"config.json": "of others"}

    # A place that cannot be a folder is refused.
    (tmp_path / "file").write_text("mine")
    (tmp_path / "broken").symlink_to(tmp_path / "gone")
    for name, message in (
        ("file", "file exists and is no folder; choose another place"),
        ("file/below/model", "file is no folder, so nothing can be made in it; choose another place"),
        ("broken", "broken is a link to what is not there; remove it, or choose another place"),
        ("broken/model", "broken is a link to what is not there; remove it, or choose another place"),
    ):
        for refused in (check_place, lambda at: move_folder(model, at)):
            with pytest.raises(StorageError, match=message):
                refused(tmp_path / name)
    assert contents(tmp_path / "model").keys() == {"a.safetensors", "config.json", "transformer/config.json"}
    assert not (tmp_path / "gone").exists()


def test_a_link_to_a_folder_is_a_place(model, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "moved").symlink_to(tmp_path / "disk")
    expected = contents(model)
    check_place(tmp_path / "moved")
    move_folder(model, tmp_path / "moved")
    assert contents(tmp_path / "disk").keys() == {*expected, LIST}


def test_a_move_that_is_cut_off_leaves_no_model(model, tmp_path, monkeypatch):
    target = tmp_path / "moved"
    move_folder(model, target)
    (model / "config.json").write_text("newer")
    (model / "b.safetensors").write_text("newer")

    def fail(self, path):
        raise OSError(f"no space for {path.name}")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(StorageError, match=r"moved: .*no space for b\.safetensors"):
        move_folder(model, target)
    assert not (target / "config.json").exists()
    monkeypatch.undo()
    move_folder(model, target)
    assert set(contents(target)) == {"b.safetensors", "config.json", LIST}


def test_what_is_cut_off_is_no_model_and_is_sent_again(store, model, monkeypatch):
    send_folder(model, URL)
    put = type(store).put_file
    for num_sent in range(3):
        (model / f"{'abc'[num_sent]}.safetensors").rename(model / f"{'bcd'[num_sent]}.safetensors")
        left = iter(range(num_sent))

        def cut(self, *given, left=left, **more):
            if next(left, None) is None:
                raise ConnectionResetError("the server is gone")
            put(self, *given, **more)

        with monkeypatch.context() as patch:
            patch.setattr(type(store), "put_file", cut)
            with pytest.raises(StorageError, match=f"{URL}: the server is gone"):
                send_folder(model, URL)
        with pytest.raises(
            StorageError, match=f"{URL} is no whole model: it has . files, and neither config.json nor model_"
        ):
            fetch_model(URL)
        send_folder(model, URL)
        assert contents(fetch_model(URL)) == contents(model)


def test_a_file_of_another_size_is_told(store, model, monkeypatch):
    put = type(store).put_file
    short = model.parent / "short"
    short.write_text("x")
    monkeypatch.setattr(type(store), "put_file", lambda self, _, to, **more: put(self, str(short), to, **more))
    with pytest.raises(StorageError, match=r"a.safetensors has 1 bytes there, and 24 were sent"):
        send_folder(model, URL)


def test_what_is_of_others_is_not_written_over(store, model):
    # Something else is not written over.
    files, root = file_system(URL)
    files.pipe_file(f"{root}/holiday.png", b"picture")
    with pytest.raises(StorageError, match=r"exists and is no exported model; choose another place"):
        send_folder(model, URL)
    with pytest.raises(StorageError, match="is no whole model: it has 1 files"):
        fetch_model(URL)
    assert files.cat_file(f"{root}/holiday.png") == b"picture"

    # Weights are not sent beside weights of others.
    files, root = file_system(URL)
    for name in ("config.json", "model.safetensors"):
        files.pipe_file(f"{root}/{name}", b"of another model")
    with pytest.raises(StorageError, match=r"has model.safetensors, which no export wrote and no index names"):
        send_folder(model, URL)
    assert files.cat_file(f"{root}/config.json") == b"of another model"
