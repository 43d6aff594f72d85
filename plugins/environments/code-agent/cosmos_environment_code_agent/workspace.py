"""The file that an agent works on, and its sandbox: a process that runs programs confined, and ends with the session.

The file is text of this process. Each program has it before its own lines, in a process that can write no file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self

import attrs

from cosmos_core.errors import PluginError
from cosmos_environment_code_agent.tasks import Case

_NAME: Final = "solution"
_SHOWN: Final = 200


@attrs.frozen(kw_only=True)
class Limits:
    """Limits of one program, as the sandbox takes them."""

    time_s: float
    cpu_s: float
    memory_bytes: int
    output_bytes: int


class Workspace:
    """One file in a sandbox, to be used as `async with`.

    Attributes:
        source: The file.
    """

    def __init__(self, source: str, limits: Limits) -> None:
        self.source = source
        self._limits: Final = attrs.asdict(limits)
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "cosmos_reward_code"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=8 * self._limits["output_bytes"] + (1 << 16),  # escaped as JSON, and what else is in an answer
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()  # and the program with it
        await self._process.wait()

    async def run(self, code: str) -> str:
        """What these lines print after the file, in its module, and how they end where that is not well."""
        ran = await self._ran(code)
        return f"{ran['output']}{_told(ran)}"

    async def values(self, cases: Sequence[Case]) -> tuple[list[str | None], str]:
        """The values of calls, None for those that were not reached, and why there were such.

        What a call raises is its value. The program is not told what the values should be.
        """
        mark = secrets.token_hex(8)
        lines = [f"_shown({number}, lambda: ({case.call}\n))" for number, case in enumerate(cases)]
        ran = await self._ran("\n".join([_SHOWN_BY.replace("MARK", mark), *lines]))
        found: dict[str, str] = {}
        for line in ran["output"].splitlines():
            head, number, value = [*line.split(" ", 2), "", ""][:3]
            if head == mark:
                found.setdefault(number, value)
        values = [found.get(str(number)) for number in range(len(cases))]
        return values, "" if None not in values else _told(ran) or "the program ended early"

    async def _ran(self, lines: str) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"program": f"{self.source}\n\n{lines}\n", "name": _NAME, "limits": self._limits}
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        with contextlib.suppress(ConnectionError):
            await self._process.stdin.drain()
        line = await self._process.stdout.readline()
        if not line:
            raise PluginError("the sandbox has ended by itself; its standard error says why")
        ran: dict[str, Any] = json.loads(line)
        if "error" in ran:
            raise PluginError(str(ran["error"]))
        return ran


_SHOWN_BY: Final = """
def _shown(number, call):
    import builtins
    try:
        value = builtins.repr(call())
    except Exception as error:
        value = f"{type(error).__name__}: {error}"
    builtins.print("\\nMARK", number, value.replace("\\n", " "), flush=True)
"""


def _told(ran: dict[str, Any]) -> str:
    """How a program ended; empty if well."""
    if ran["ending"] == "finished":
        return ""
    if ran["ending"] != "failed":
        return f"[ended: {ran['ending']}]"
    lines = ran["errors"].strip().splitlines()
    return lines[-1][-_SHOWN:] if lines else f"[ended with {ran['code']}]"
