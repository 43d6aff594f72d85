"""What programs try, and what comes of it, in real processes."""

import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from cosmos_core.errors import ConfigError, PluginError
from cosmos_reward_code import sandbox
from cosmos_reward_code.confinement import landlock, program, seccomp
from cosmos_reward_code.confinement.syscalls import ALLOWED, MACHINES

LIMITS = sandbox.Limits(time_s=5.0, cpu_s=5.0, memory_bytes=256 << 20, output_bytes=10_000)


def run(source, given="", **limits):
    changed = {**{name: getattr(LIMITS, name) for name in LIMITS.__slots__ if name != "__weakref__"}, **limits}
    return sandbox.run(source, given, sandbox.Limits(**changed), name="__main__")


def changed_package(folder, module, source):
    """A copy of the package with more at the end of a module of its inside; returns the folder to import it from."""
    copy = folder / "cosmos_reward_code"
    subprocess.run(["cp", "-r", Path(sandbox._ROOT) / copy.name, copy], check=True)
    path = copy / "confinement" / f"{module}.py"
    path.write_text(f"{path.read_text()}\n\n{source}")
    return folder


_OLD_LANDLOCK = """
_of_today = syscall

def syscall(number, *arguments):
    result = _of_today(number, *arguments)
    return min(result, 1) if (number, *arguments) == (_CREATE_RULESET, None, 0, _GET_VERSION) else result
"""


@pytest.fixture(params=["Linux of today", "Linux 5.13"])
def kernel(request, monkeypatch, tmp_path):
    """The kernel's Landlock, and its first version."""
    if request.param == "Linux 5.13":
        folder = tmp_path / "old"
        folder.mkdir()
        monkeypatch.setattr(sandbox, "_ROOT", str(changed_package(folder, "landlock", _OLD_LANDLOCK)))
    return request.param


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret.txt"
    path.write_text("for the reward alone")
    path.chmod(0o644)
    return path


def test_a_program_reads_prints_and_uses_the_standard_library():
    ran = run(
        "import asyncio, dataclasses, decimal, heapq, json, math, random, re, sys\n"
        "print(json.dumps(sorted(map(int, sys.stdin)))); print(asyncio.run(asyncio.sleep(0, 5)), __name__, sys.argv)",
        "3\n1\n2\n",
    )
    assert (ran.ending, ran.code, ran.errors) == ("finished", 0, "")
    assert ran.output == "[1, 2, 3]\n5 __main__ ['main.py']\n"


def test_much_goes_in_and_what_is_not_read_is_no_failure():
    assert run("print(len(input()))", "x" * 3_000_000).output == "3000000\n"
    assert run("print(1)", "x" * 3_000_000).ending == "finished"


@pytest.mark.usefixtures("kernel")
def test_what_a_program_may_not_do_fails_in_it(subtests):
    for source, error in [
        ("import os; os.fork()", "PermissionError"),
        ("import subprocess; subprocess.run(['true'])", "PermissionError"),
        ("import os; os.execv('/bin/true', ['true'])", "PermissionError"),
        ("import os; os.posix_spawn('/bin/true', ['true'], {})", "PermissionError"),
        ("import threading; threading.Thread(target=print).start()", "can't start new thread"),
        ("import multiprocessing as m; m.Process(target=print).start()", "PermissionError"),
        ("import os; os.kill(-1, 0)", "PermissionError"),
        ("import os; os.kill(os.getppid(), 0)", "PermissionError"),
        ("import resource as r, os; r.prlimit(os.getppid(), r.RLIMIT_CPU)", "PermissionError"),
        ("import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), 0)", "PermissionError"),
        ("import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))", "not allowed to raise maximum limit"),
        ("import fcntl, os; fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())", "PermissionError"),
        ("import fcntl, os; fcntl.fcntl(0, 15, bytes(8))", "PermissionError"),
        ("import fcntl; fcntl.fcntl(0, 10, 9)", "PermissionError"),
        (
            "import fcntl, socket; a, b = socket.socketpair(); fcntl.ioctl(a, 0x8901, (1).to_bytes(4, 'little'))",
            "PermissionError",
        ),
        ("import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)", "PermissionError"),
        ("import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_RAW)", "PermissionError"),
        ("import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)", "PermissionError"),
        ("import socket; socket.socketpair(socket.AF_INET)", "PermissionError"),
        ("import os; os.open('/dev/null', os.O_RDONLY | os.O_TRUNC)", "PermissionError"),
        ("import os; os.open('/dev/null', os.O_WRONLY)", "PermissionError"),
        ("open('/etc/passwd')", "PermissionError"),
        ("open('/proc/self/environ')", "PermissionError"),
        ("open('/tmp/left-behind', 'w')", "PermissionError"),
        ("import os; os.mkdir('/tmp/left-behind')", "PermissionError"),
        ("import os; os.memfd_create('x')", "PermissionError"),
        ("import os; os.chroot('/')", "PermissionError"),
        ("import os; os.listdir('/')", "PermissionError"),
        (
            "import ctypes as c; l = c.CDLL(None, use_errno=True); assert l.mount(0, b'/', 0, 0, 0) >= 0",
            "AssertionError",
        ),
        ("import numpy", "ModuleNotFoundError"),
        ("import cosmos_reward_code", "ModuleNotFoundError"),
        ("x = 'x' * (1 << 30)", "MemoryError"),
        ("def f(:", "SyntaxError"),
        ("\x00", "SyntaxError"),
    ]:
        with subtests.test(source=source, error=error):
            ran = run(source)
            assert (ran.ending, ran.code) == ("failed", 1)
            assert error in ran.errors


def test_no_file_of_others_can_be_read(secret):
    assert "PermissionError" in run(f"print(open({str(secret)!r}).read())").errors


@pytest.mark.usefixtures("kernel")
def test_no_file_that_can_be_read_can_be_emptied(secret, monkeypatch, tmp_path):
    more = f"_usual = _readable\n\ndef _readable():\n    yield from _usual()\n    yield {str(secret)!r}\n"
    folder = tmp_path / "readable"
    folder.mkdir()
    monkeypatch.setattr(sandbox, "_ROOT", str(changed_package(folder, "program", more)))
    ran = run(
        f"import os\nprint(open({str(secret)!r}).read())\n"
        f"for more in (os.O_TRUNC, os.O_CREAT | os.O_TRUNC, os.O_RDWR):\n"
        f"    try: os.open({str(secret)!r}, more)\n"
        "    except PermissionError: print('no')"
    )
    assert ran.output == "for the reward alone\nno\nno\nno\n"
    assert secret.read_text() == "for the reward alone"


@pytest.mark.usefixtures("kernel")
def test_no_message_reaches_a_socket_in_the_file_system(tmp_path, subtests):
    for kind in ["SOCK_DGRAM", "SOCK_RAW", "SOCK_STREAM"]:
        with subtests.test(kind=kind), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
            path = str(tmp_path / kind)
            server.bind(path)
            ran = run(f"import socket; socket.socketpair(socket.AF_UNIX, socket.{kind})[0].sendto(b'x', {path!r})")
            assert ran.ending == "failed"
            server.settimeout(0.05)
            with pytest.raises(TimeoutError):
                server.recv(1)


@pytest.mark.usefixtures("kernel")
def test_no_signal_is_sent_by_way_of_a_descriptor():
    with subprocess.Popen(["sleep", "20"]) as victim:
        ran = run(
            f"import fcntl, os; r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETOWN, {victim.pid}); "
            "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC); os.write(w, b'x')"
        )
        assert "PermissionError" in ran.errors
        time.sleep(0.05)
        assert victim.poll() is None
        victim.kill()


def test_no_connection_is_made():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ran = run(f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))")
        assert "PermissionError" in ran.errors
        server.settimeout(0.05)
        with pytest.raises(TimeoutError):
            server.accept()


def test_nothing_of_the_environment_is_seen(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "for the reward alone")
    assert "SECRET_KEY" not in run("import os; print(dict(os.environ))").output


def test_a_program_that_goes_too_far_is_ended(subtests):
    for source, ending, code, limits in [
        ("while True: print('x' * 100)", "output limit", -signal.SIGKILL, {}),
        ("import time; time.sleep(60)", "time limit", -signal.SIGKILL, {"time_s": 0.3}),
        ("import os; os.close(1); os.close(2)\nwhile True: pass", "time limit", -signal.SIGKILL, {"time_s": 0.3}),
        ("import sys\nwhile True: sys.stderr.write('x' * 99)", "time limit", -signal.SIGKILL, {"time_s": 0.3}),
        ("while True: pass", "failed", -signal.SIGXCPU, {"cpu_s": 1.0, "time_s": 60.0}),
        ("import os; os.abort()", "failed", -signal.SIGABRT, {}),
        ("x = []\nwhile True: x.append('y' * 1_000_000)", "failed", 1, {}),
        ("raise SystemExit(3)", "failed", 3, {}),
    ]:
        with subtests.test(source=source, ending=ending, code=code, limits=limits):
            ran = run(source, **limits)
            assert (ran.ending, ran.code) == (ending, code)
            assert len(ran.output) <= LIMITS.output_bytes
            assert len(ran.errors) <= 4096


def test_no_process_is_left_after_any_of_it():
    before = psutil.Process().children(recursive=True)
    run("import time; time.sleep(60)", time_s=0.2)
    assert [each for each in psutil.Process().children(recursive=True) if each not in before] == []


def test_a_program_dies_with_the_process_that_ran_it():
    code = (
        "from cosmos_reward_code import sandbox\n"
        "sandbox.run('import time; time.sleep(60)', '', "
        "sandbox.Limits(time_s=60, cpu_s=5, memory_bytes=1 << 28, output_bytes=99), name='x')"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as starter:
        while not (children := psutil.Process(starter.pid).children()):
            time.sleep(0.01)
        time.sleep(0.2)
        starter.kill()
    children[0].wait(5)


def test_what_cannot_be_confined_is_not_run(monkeypatch, tmp_path, subtests):
    """In a copy of the package whose kernel refuses."""
    for module, name in [(landlock, "Landlock"), (seccomp, "seccomp")]:
        with subtests.test(module=module, name=name), monkeypatch.context() as patch:
            refusal = "def restrict(*_):\n    raise OSError(38, 'Function not implemented')\n"
            (tmp_path / name).mkdir()
            folder = changed_package(tmp_path / name, module.__name__.rpartition(".")[2], refusal)
            patch.setattr(sandbox, "_ROOT", str(folder))
            with pytest.raises(PluginError, match=f"was not run: {name} cannot be used here .Function not implemented"):
                run("print(1)")
            with pytest.raises(ConfigError, match=f"so none is run.*{name}"):
                sandbox.check(LIMITS)


def test_limits_that_nothing_can_keep_are_told():
    tight = sandbox.Limits(time_s=5.0, cpu_s=5.0, memory_bytes=1 << 28, output_bytes=2)
    with pytest.raises(ConfigError, match=r"does not do so in these limits \(output limit\)"):
        sandbox.check(tight)


def test_another_machine_is_refused(monkeypatch):
    monkeypatch.setattr(sandbox.platform, "machine", lambda: "riscv64")
    with pytest.raises(ConfigError, match=r"on Linux \(x86_64, aarch64\), and this is linux riscv64"):
        sandbox.check(LIMITS)


def test_programs_run_from_several_threads_do_not_mix():
    outputs = {}
    threads = [
        threading.Thread(target=lambda n=n: outputs.update({n: run("print(input())", str(n)).output})) for n in range(6)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert outputs == {n: f"{n}\n" for n in range(6)}


def test_no_call_that_reaches_outside_is_allowed():
    outside = {
        "socket",
        "connect",
        "bind",
        "clone",
        "clone3",
        "fork",
        "vfork",
        "execve",
        "execveat",
        "ptrace",
        "unlink",
    }
    outside |= {
        "io_uring_setup",
        "bpf",
        "mount",
        "unshare",
        "setns",
        "process_vm_writev",
        "memfd_create",
        "shmget",
        "prctl",
    }
    assert not outside & ALLOWED.keys()
    for place in MACHINES.values():
        numbers = [each[place] for each in ALLOWED.values() if each[place] is not None]
        assert len(numbers) == len(set(numbers))


def test_the_readable_paths_are_the_librarys():
    assert all(not path.startswith(("/home", "/tmp", "/proc", "/etc/passwd")) for path in program._readable())
