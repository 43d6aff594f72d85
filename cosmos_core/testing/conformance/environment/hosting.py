"""Dialogues in this process, where what an environment does with the event loop and the row can be looked at."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Sequence
from typing import Final

import attrs

from cosmos_core.protocols import Environment
from cosmos_core.testing.conformance.environment.dialogues import Script, shown

_TICK_S: Final = 0.01


@attrs.frozen(kw_only=True)
class Hosted:
    """What playing some dialogues did.

    Attributes:
        changed: Dialogues whose row is another one since.
        blocked_s: The longest time for which the event loop could do nothing else.
        where: The dialogue in which that was.
        left: Tasks that go on after every dialogue was closed.
    """

    changed: tuple[str, ...]
    blocked_s: float
    where: str
    left: tuple[str, ...]


def host(make: Callable[[], Environment], scripts: Sequence[Script], seed: int) -> Hosted:
    """Play dialogues one after the other, on one event loop as in a worker."""
    return asyncio.run(_host(make, scripts, seed))


async def _host(make: Callable[[], Environment], scripts: Sequence[Script], seed: int) -> Hosted:
    changed: list[str] = []
    longest, where = 0.0, ""
    for script in scripts:
        prompt = copy.deepcopy(script.prompt)
        pulse = _Pulse()
        beating = asyncio.ensure_future(pulse.beat())
        await _play(make(), attrs.evolve(script, prompt=prompt), seed)
        beating.cancel()
        await asyncio.wait({beating})
        if pulse.longest() > longest:
            longest, where = pulse.longest(), shown(script)
        if prompt != script.prompt:
            changed.append(shown(script))
    others = asyncio.all_tasks() - {asyncio.current_task()}
    left = tuple(sorted(getattr(task.get_coro(), "__qualname__", repr(task)) for task in others))
    return Hosted(changed=tuple(changed), blocked_s=longest, where=where, left=left)


async def _play(environment: Environment, script: Script, seed: int) -> None:
    await environment.reset(script.prompt, seed)
    for turn in script.turns:
        if (await environment.step(turn)).done:
            break
    await environment.close()


class _Pulse:
    """A coroutine that wants its turn all the time."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._longest = 0.0

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._mark()

    def longest(self) -> float:
        """Seconds of the longest pause, the one that goes on included."""
        self._mark()
        return self._longest

    def _mark(self) -> None:
        now = time.monotonic()
        self._longest, self._last = max(self._longest, now - self._last), now
