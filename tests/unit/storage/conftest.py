"""A store, and models to send to it."""

import fsspec
import pytest

from cosmos_core.storage.models import LIST

URL = "memory://models/one"


@pytest.fixture
def store(monkeypatch, tmp_path):
    monkeypatch.setenv("COSMOS_CACHE", str(tmp_path / "cache"))
    yield fsspec.filesystem("memory")
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    (folder / "transformer").mkdir(parents=True)
    for name in ("a.safetensors", "config.json", "transformer/config.json"):
        (folder / name).write_text(f"content of {name}")
    return folder


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def snapshot(tmp_path):
    """A model as the hub's library keeps it: links to files that lie elsewhere, and serve other snapshots too."""
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    folder.mkdir()
    for name in ("config.json", "old.safetensors", "old.safetensors.index.json", LIST):
        (blobs / name).write_text('{"weight_map": {"w": "old.safetensors"}}')
        (folder / name).symlink_to(blobs / name)
    return folder
