import os
import threading
import time

import pytest

from cosmos_core.errors import StorageError
from cosmos_core.storage import cache_folder
from cosmos_dataset_world.clips import cache
from cosmos_dataset_world.clips.cache import LocalCache


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


def write(content):
    return lambda path: path.write_bytes(content)


def age(folder, name, seconds):
    past = time.time() - seconds
    os.utime(folder / name, (past, past))


def names(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_a_file_is_made_once_and_whole(folder):
    # A file is made once.
    made = LocalCache(folder, 1000)
    assert made.get("a", write(b"first")).read_bytes() == b"first"
    assert LocalCache(folder, 1000).get("a", write(b"second")).read_bytes() == b"first"
    assert names(folder) == ["a"]

    # What fails leaves nothing.
    def fail(path):
        path.write_bytes(b"half")
        raise KeyError

    with pytest.raises(KeyError):
        LocalCache(folder, 1000).get("b", fail)
    assert [path.name for path in folder.iterdir() if path.name != ".lock"] == ["a"]


def test_the_oldest_make_room_and_what_is_in_use_stays(folder):
    made = LocalCache(folder, 1000)
    for name in "abcd":
        made.get(name, write(bytes(300)))
    assert names(folder) == ["a", "b", "c", "d"], "all are in use"
    for seconds, name in ((4000, "b"), (3000, "a"), (2000, "c"), (1000, "d")):
        age(folder, name, seconds)
    made.get("b", write(b"never made"))
    made.get("e", write(bytes(300)))
    assert names(folder) == ["b", "d", "e"]

    # What was left half written makes room too.
    (folder / ".partial-0-x").write_bytes(bytes(2000))
    age(folder, ".partial-0-x", 100_000)
    made.get("f", write(bytes(100)))
    assert not (folder / ".partial-0-x").exists()
    assert names(folder) == ["b", "e", "f"]


def test_many_at_once_get_whole_files(folder, monkeypatch):
    monkeypatch.setattr(cache, "IN_USE_S", 0.0)
    made = [LocalCache(folder, 4000) for _ in range(2)]
    faults = []

    def read(number):
        for turn in range(60):
            name = str((turn * 7 + number) % 9)
            path = made[number % 2].get(name, write(name.encode() * 1000))
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                continue  # nothing is in use here, so it may be gone at once
            if content != name.encode() * 1000:
                faults.append((name, len(content)))

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 5000


def test_a_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    # Where the cache is.
    monkeypatch.delenv("COSMOS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "cosmos"
    monkeypatch.setenv("COSMOS_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"

    # A folder that cannot be written is told.
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file/cache cannot be used: .*; set COSMOS_CACHE to a folder"):
        LocalCache(tmp_path / "file" / "cache", 10).get("a", write(b""))
