"""The process that runs a program: it gives up all rights, says so, and only then runs what a model wrote.

Its arguments are the descriptors of the program and of where to say so, its starter's process id, and the limits.
"""

from __future__ import annotations

import os
import resource
import sys
import sysconfig
import types
from collections.abc import Iterator

from cosmos_reward_code.confinement import kernel, landlock, seccomp

CONFINED = b"confined"
"""What is said before the program runs, once it cannot do harm; anything else is why it was not run."""


def main(name: str, root: str) -> None:
    """Run the program as module `name`; `root` is where this package was imported from, and is forgotten first."""
    file, answer, parent, cpu_s, memory_bytes = map(int, sys.argv[1:])
    source = _read(file)
    try:
        _confine(parent, cpu_s, memory_bytes)
    except OSError as error:
        os.write(answer, str(error).encode())
        return
    os.write(answer, CONFINED)
    os.close(answer)
    os.close(file)
    sys.path.remove(root)
    for imported in [each for each in sys.modules if each.partition(".")[0] == __name__.partition(".")[0]]:
        del sys.modules[imported]
    sys.argv = ["main.py"]
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, "main.py", "exec", dont_inherit=True), vars(module))  # noqa: S102 - this is what it is for


def _confine(parent: int, cpu_s: int, memory_bytes: int) -> None:
    kernel.renounce()
    kernel.die_with(parent)
    # At the first of the two the kernel says which limit it was, by SIGXCPU; a program may not hear it.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    for what, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(what, (most, most))
    try:
        landlock.restrict(_readable())
    except OSError as error:
        raise OSError(
            f"Landlock cannot be used here ({error.strerror}); it needs Linux 5.13 or newer with it on"
        ) from None
    try:
        seccomp.restrict()
    except OSError as error:
        raise OSError(f"seccomp cannot be used here ({error.strerror})") from None


def _readable() -> Iterator[str]:
    """The files that Python reads while a program runs: its standard library and the shared libraries below it."""
    for name in ("stdlib", "platstdlib"):
        yield sysconfig.get_path(name, vars={"base": sys.base_prefix, "platbase": sys.base_exec_prefix})
    yield from ("/lib", "/lib64", "/usr/lib", "/usr/lib64", f"{sys.base_prefix}/lib")
    yield from ("/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo", "/dev/null", "/dev/urandom")


def _read(file: int) -> bytes:
    size = os.fstat(file).st_size
    source = b""
    while len(source) < size and (part := os.pread(file, size - len(source), len(source))):
        source += part
    return source
