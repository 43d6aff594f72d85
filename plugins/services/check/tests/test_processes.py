"""What importing a plugin does, asked in a process of its own."""

import os
import subprocess
import time

import psutil
import pytest

from cosmos_core.errors import PluginError
from cosmos_core.plugins.discovery import PluginRecord
from cosmos_service_check.probe import load
from cosmos_service_check.recorder import run_pytest

LASTING = "import subprocess, sys\nprocess = subprocess.Popen(['sleep', '1234'])\nprint('started', process.pid)\n"


@pytest.fixture
def ask(tmp_path):
    """Import a module of this source."""

    def answer(source):
        (tmp_path / "acme_import.py").write_text(source)
        record = PluginRecord(kind="reward", name="a", distribution="acme", version="1.0", module="acme_import")
        return load(record, {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])})

    return answer


@pytest.fixture
def limit_passes_at(monkeypatch):
    """Let the time limit of a process pass once a file is there, however long that takes."""
    wait = subprocess.Popen.wait

    def until(file):
        def waiting(process, timeout=None):
            while timeout is not None and not file.exists() and process.poll() is None:
                time.sleep(0.02)
            return wait(process, timeout and 0.01)

        monkeypatch.setattr(subprocess.Popen, "wait", waiting)

    return until


def has_ended(pid):
    """Whether a process ends; one that its new parent does not wait for remains as a zombie."""
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_what_an_import_starts_and_prints_is_told_and_ended(ask):
    threads = "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), name='lasting').start()\n"
    done = ask(f"import sys\nsys.stdout.buffer.write(b'caf\\xe9')\n{LASTING}{threads}")
    threads, processes, printed = done.brought
    assert threads == "importing acme_import starts threads (lasting); start them when it is used"
    assert processes == "importing acme_import starts processes (sleep); start them when it is used"
    assert "prints 'caf\ufffdstarted " in printed
    assert has_ended(int(printed.partition("started ")[2].partition("'")[0]))


def test_an_import_that_does_not_end_is_told_and_ended(ask, limit_passes_at, tmp_path):
    limit_passes_at(tmp_path / "pid")
    draft, file = str(tmp_path / "draft"), str(tmp_path / "pid")
    source = f"import os, pathlib, time\npathlib.Path({draft!r}).write_text(str(os.getpid()))\n"
    assert ask(f"{source}os.rename({draft!r}, {file!r})\ntime.sleep(99)\n").unimported == (
        "it did not end in 120 s; import nothing that waits or loops"
    )
    assert has_ended(int((tmp_path / "pid").read_text()))


def test_an_import_that_ends_the_process_is_told(ask):
    ending = "import os\nprint('bye', flush=True)\nos._exit(3)\n"
    assert ask(ending).unimported == "the process ended with exit code 3: bye"


def test_tests_that_do_not_end_are_told_and_ended(limit_passes_at, tmp_path):
    limit_passes_at(tmp_path / "begun")
    source = f"import os, pathlib, time\n{LASTING}pathlib.Path('draft').write_text(str(process.pid))\n"
    test = "def test_a():\n    os.rename('draft', 'begun')\n    time.sleep(99)\n"
    (tmp_path / "test_a.py").write_text(source + test)
    with pytest.raises(PluginError, match=r"the kit did not end in 9 s; its last lines:"):
        run_pytest(tmp_path, timeout_s=9.0, environment={})
    assert has_ended(int((tmp_path / "begun").read_text()))
