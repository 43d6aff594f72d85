"""Runs a program that nobody trusts: no privileges, no network, no files, no other processes, and little of the rest.

What the confined process does to itself is in `confinement`. It can start no process, so ending it ends everything.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final, Literal, TypeAlias, cast

import attrs

from cosmos_core.errors import ConfigError, PluginError
from cosmos_reward_code.confinement.program import CONFINED
from cosmos_reward_code.confinement.syscalls import MACHINES

Ending: TypeAlias = Literal["finished", "failed", "time limit", "output limit"]

_ROOT: Final = str(Path(__file__).parents[1])
_START_S: Final = 30.0
_CHUNK: Final = 1 << 16
_SHOWN_BYTES: Final = 4096
_ENVIRONMENT: Final = {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}


@attrs.frozen(kw_only=True)
class Limits:
    """Limits of a program: seconds that pass, seconds of processor, bytes of memory, bytes that it prints."""

    time_s: float
    cpu_s: float
    memory_bytes: int
    output_bytes: int


@attrs.frozen(kw_only=True)
class Ran:
    """The outcome of a program.

    Attributes:
        ending: How it ended; `failed` is any other end than exit code 0.
        code: Its exit code, or minus the signal that ended it.
        output: What it printed, no more than the limit.
        errors: The end of what it wrote to standard error.
    """

    ending: Ending
    code: int
    output: str
    errors: str


def check(limits: Limits) -> None:
    """Run a program that does nothing.

    Raises:
        ConfigError: Programs cannot be confined on this machine; the message says why.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in MACHINES:
        raise ConfigError(
            f"programs can be confined on Linux ({', '.join(MACHINES)}), and this is {sys.platform} {machine}"
        )
    try:
        ran = run("print(6 * 7)", "", limits, name="__main__")
    except PluginError as error:
        raise ConfigError(f"programs cannot be confined on this machine, so none is run: {error}") from error
    if ran.output != "42\n":
        raise ConfigError(
            f"a program that prints 42 does not do so in these limits ({ran.ending}); raise them: {ran.errors}"
        )


def run(source: str, given: str, limits: Limits, *, name: str) -> Ran:
    """Run a Python program with the standard library.

    Args:
        source: The program.
        given: Its standard input.
        limits: What it may use.
        name: Its `__name__`.

    Raises:
        PluginError: It could not be confined, and was not run.
    """
    with contextlib.ExitStack() as held:
        program = os.memfd_create("program", os.MFD_CLOEXEC)
        held.callback(os.close, program)
        os.write(program, source.encode(errors="replace"))
        answer, theirs = os.pipe()
        held.callback(os.close, answer)
        try:
            process = _start(program, theirs, limits, name)
        finally:
            os.close(theirs)
        with process:
            try:
                _await_confinement(process, answer)
                return _follow(process, given.encode(errors="replace"), limits)
            finally:
                process.kill()


def _start(program: int, answer: int, limits: Limits, name: str) -> subprocess.Popen[bytes]:
    bootstrap = (
        f"import sys; sys.path.insert(0, {_ROOT!r}); from cosmos_reward_code.confinement.program import main; "
        f"main({name!r}, {_ROOT!r})"
    )
    numbers = (program, answer, os.getpid(), math.ceil(limits.cpu_s), limits.memory_bytes)
    return subprocess.Popen(
        [os.path.realpath(sys.executable), "-s", "-P", "-S", "-B", "-c", bootstrap, *map(str, numbers)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        pass_fds=(program, answer),
        env=_ENVIRONMENT,
        cwd="/",
        start_new_session=True,
    )


def _await_confinement(process: subprocess.Popen[bytes], answer: int) -> None:
    """Return when the program is about to run; its own time begins then, however busy the machine is.

    Raises:
        PluginError: It will not.
    """
    ready, _, _ = select.select([answer], [], [], _START_S)
    told = os.read(answer, _CHUNK) if ready else f"no word within {_START_S:g} s".encode()
    if told == CONFINED:
        return
    process.kill()
    assert process.stderr is not None
    why = told or b"its process ended: " + process.stderr.read(_SHOWN_BYTES)
    raise PluginError(f"a program could not be confined, and was not run: {why.decode(errors='replace')}")


def _follow(process: subprocess.Popen[bytes], given: bytes, limits: Limits) -> Ran:
    """Feed the program, read what it prints, and wait for its end, within the limits."""
    deadline = time.monotonic() + limits.time_s
    output, errors = bytearray(), bytearray()
    ending: Ending | None = None
    for stream, data in _printed(process, given, deadline):
        if stream is process.stdout:
            output += data
        else:
            errors += data
            del errors[:-_SHOWN_BYTES]
        if len(output) > limits.output_bytes:
            ending = "output limit"
            break
    if ending is None:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
            ending = "failed" if process.returncode else "finished"
        except subprocess.TimeoutExpired:
            ending = "time limit"
    return Ran(
        ending=ending,
        code=process.returncode if process.returncode is not None else -signal.SIGKILL,
        output=output[: limits.output_bytes].decode(errors="replace"),
        errors=errors.decode(errors="replace"),
    )


def _printed(process: subprocess.Popen[bytes], given: bytes, deadline: float) -> Iterator[tuple[IO[bytes], bytes]]:
    """Yield (stream, what came on it) until both are closed or the deadline is past."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    left = memoryview(given)
    with selectors.DefaultSelector() as selector:
        os.set_blocking(process.stdin.fileno(), False)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        for stream in (process.stdout, process.stderr):
            selector.register(stream, selectors.EVENT_READ)
        num_open = 2
        while num_open and (remaining := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(remaining):
                if key.fileobj is process.stdin:
                    left = _fed(process.stdin, left)
                    if not left:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                elif data := os.read(key.fd, _CHUNK):
                    yield cast("IO[bytes]", key.fileobj), data
                else:
                    selector.unregister(key.fileobj)
                    num_open -= 1


def _fed(stdin: IO[bytes], left: memoryview) -> memoryview:
    """The rest of the input after as much was given as is taken now; nothing where nobody reads it."""
    try:
        return left[os.write(stdin.fileno(), left) :] if left else left
    except BrokenPipeError:
        return left[:0]
