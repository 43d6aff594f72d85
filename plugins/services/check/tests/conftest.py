"""Throw-away distributions, put on `sys.path` for one test."""

import shutil
import sys
import zipfile

import pytest

from .wheels import build


@pytest.fixture
def make_distribution(tmp_path, monkeypatch):
    """Install a wheel with these entry points and modules into a folder of its own, and put that on `sys.path`."""
    known = set(sys.modules)

    def forget(folder):
        for module in set(sys.modules) - known:
            if str(folder) in str(getattr(sys.modules[module], "__file__", "")):
                del sys.modules[module]

    def make(name, *, entries, modules, requires=("cosmos-core>=0.1",)):
        folder = tmp_path / f"site-{name}"
        if folder.exists():  # the next case of a table
            shutil.rmtree(folder)
            forget(folder)
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        metadata += "".join(f"Requires-Dist: {each}\n" for each in requires)
        with zipfile.ZipFile(build(tmp_path, name, modules, entries, metadata)) as archive:
            archive.extractall(folder)
        monkeypatch.syspath_prepend(str(folder))
        return folder

    yield make
    forget(tmp_path)
