"""`vllm serve` on an exported model, as a process of its own that ends with this one."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Final

import typer

from cosmos_core.errors import ConfigError, EngineError

_END_S: Final = 30.0
"""In which it ends by itself once it is interrupted."""


def has_vllm() -> bool:
    """True if vLLM is installed here."""
    return importlib.util.find_spec("vllm") is not None and _program() is not None


def serve_vllm(directory: Path, name: str, host: str, port: int, *, trust_remote_code: bool) -> None:
    """Run `vllm serve` until it ends or Ctrl-C comes; nothing of it is left then.

    Raises:
        ConfigError: It is not installed.
        EngineError: It ended by itself, in failure.
    """
    program = _program()
    if program is None:
        raise ConfigError("--engine vllm: vLLM is not installed here; pip install 'cosmos-engine-vllm[gpu]'")
    command = [program, "serve", str(directory), "--served-model-name", name, "--host", host, "--port", str(port)]
    typer.echo(f"Handing over to vllm serve: http://{host}:{port}/v1", err=True)
    before = signal.signal(signal.SIGTERM, _interrupt)
    # Its processes make a group, so that none is left; Ctrl-C comes to it from here, once.
    process = subprocess.Popen([*command, *(["--trust-remote-code"] if trust_remote_code else [])], process_group=0)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(_END_S)
        code = 0
    finally:
        signal.signal(signal.SIGTERM, before)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code:
        raise EngineError(f"vllm serve ended with exit code {code}; see what it printed")


def _program() -> str | None:
    """The program `vllm` beside this Python, or on the path."""
    beside = Path(sys.executable).with_name("vllm")
    return str(beside) if beside.is_file() else shutil.which("vllm")


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
