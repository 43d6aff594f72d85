import os
import stat

import pytest

from cosmos_core.files import replace_file


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    replace_file(path, b"old", mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, b"new")
    assert (path.read_bytes(), [*tmp_path.iterdir()]) == (b"old", [path])
    monkeypatch.undo()
    replace_file(path, b"new")
    assert (path.read_bytes(), [*tmp_path.iterdir()]) == (b"new", [path])
    # What writers left that were killed goes; what others write just now, and drafts of other files, stay.
    names = ("x.json.0a1b2c3d.draft", "x.json.4e5f6a7b.draft", "thesis.20240101.draft")
    left, going_on, other = (tmp_path / f".{name}" for name in names)
    for each in (left, going_on, other):
        each.touch()
    for each in (left, other):
        os.utime(each, (0, 0))
    replace_file(path, b"new")
    assert {*tmp_path.iterdir()} == {path, going_on, other}
    # As any file that is made anew.
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
