"""Ordinary dialogues with an environment, in a worker process as a run has them or in this one."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import queue
import time
from collections.abc import Callable, Sequence
from typing import Final

import attrs

from cosmos_core.config.schema import EnvironmentConfig
from cosmos_core.errors import CosmosError
from cosmos_core.protocols import Environment
from cosmos_core.rollout.episodes.messages import Answered, Failed, Opened, Reply
from cosmos_core.rollout.episodes.pool import EnvironmentPool
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.testing.conformance.processes import marked
from cosmos_core.types import JSON, Message, Prompt

_QUESTION: Final = "What is 34 times 56?"
_TIMES: Final = 3


@attrs.frozen(kw_only=True)
class Script:
    """A row, and the model's turns, as far as the environment asks for them."""

    prompt: Prompt
    turns: tuple[str, ...]


def ordinary_scripts(turns: Sequence[str]) -> tuple[Script, ...]:
    """Dialogues of which each has one turn over and over, of rows of plain text and of a chat.

    Args:
        turns: Turns that mean something to the environment; garbled ones are added.
    """
    metadata: dict[str, JSON] = {"source": "conformance kit", "tags": ["arithmetic", "kit"], "steps": {"number": 2}}
    plain = Prompt(text=_QUESTION, reference="1904", metadata=metadata)
    chat = attrs.evolve(
        plain, text=(Message(role="system", content="Be brief."), Message(role="user", content=_QUESTION))
    )
    garbled = (
        "#### 1904",
        "",
        " \n\t\n",
        "Ответ — 1904 ✅, 世界 🧮, e\u0301, \u200b٨",
        '{"answer": [8, "\\boxed{8 \\frac{ $ ]}',
        "\x00\x1b[31m8\x7f",
        "9" * 5000,
        "34*56=1904 and " * 1000,
    )
    return (
        *(Script(prompt=plain, turns=(turn,) * _TIMES) for turn in (*turns, *garbled)),
        Script(prompt=chat, turns=("#### 1904",) * _TIMES),
    )


def shown(script: Script) -> str:
    """A dialogue in a message."""
    turn = script.turns[0] if script.turns else ""
    text = turn if len(turn) <= 60 else f"{turn[:50]}… ({len(turn)} long)"
    return f"the dialogue of {text!r}"


_CHECK_S: Final = 0.2


@attrs.frozen(kw_only=True)
class Transcript:
    """Everything that an environment said in one dialogue.

    Attributes:
        words: What it began with.
        answers: To each turn that it was given.
        failed: Why it could not go on; None if it could.
    """

    words: str | None = None
    answers: tuple[Answered, ...] = ()
    failed: Failed | None = None

    @property
    def said(self) -> tuple[object, ...]:
        """All of it, to be compared with another's."""
        return (self.words, *((each.observation, each.role, each.done, each.reward) for each in self.answers))


@attrs.frozen(kw_only=True)
class WorkerRun:
    """The results of a worker for some dialogues.

    Attributes:
        transcripts: Of each; None for those that were not begun after a timeout.
        leftovers: Command lines of the processes that outlived the worker.
    """

    transcripts: tuple[Transcript | None, ...]
    leftovers: tuple[str, ...]

    @property
    def is_sound(self) -> bool:
        """True if every dialogue went its way and nothing is left."""
        return not self.leftovers and all(each is not None and each.failed is None for each in self.transcripts)


def play_in_worker(
    environment: EnvironmentConfig, scripts: Sequence[Script], *, hash_seed: str, seed: int, at_once: bool = False
) -> WorkerRun:
    """Play dialogues in a worker process, until all are over or one takes too long.

    Args:
        environment: The environment as a recipe has it.
        scripts: The dialogues.
        hash_seed: `PYTHONHASHSEED` of the worker.
        seed: `run.seed`, and that of each dialogue.
        at_once: Whether they go on in turns, instead of one after the other.
    """
    with marked(hash_seed) as worker, contextlib.closing(EnvironmentPool(environment, seed=seed)) as pool:
        pool.start()
        table = _Table(pool, seed)
        found = table.in_turns(scripts) if at_once else table.one_by_one(scripts)
    return WorkerRun(transcripts=tuple(found), leftovers=worker.leftovers)


class _Table:
    """Asks environments in a pool, one thing after the other."""

    def __init__(self, pool: EnvironmentPool, seed: int) -> None:
        self._pool, self._seed = pool, seed
        self._replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()

    def one_by_one(self, scripts: Sequence[Script]) -> list[Transcript | None]:
        found: list[Transcript | None] = [None] * len(scripts)
        for index, script in enumerate(scripts):
            episode, transcript = self._begin(script)
            for turn in script.turns:
                transcript = self._go_on(episode, transcript, turn)
            self._pool.forget(episode)
            found[index] = transcript
            # What hangs once may hang in every dialogue, and each would take its time.
            if transcript.failed is not None and transcript.failed.timed_out:
                break
        return found

    def in_turns(self, scripts: Sequence[Script]) -> list[Transcript | None]:
        begun = [self._begin(script) for script in scripts]
        for place in range(max(len(script.turns) for script in scripts)):
            begun = [
                (episode, self._go_on(episode, transcript, script.turns[place]))
                for script, (episode, transcript) in zip(scripts, begun, strict=True)
            ]
        return [transcript for _, transcript in begun]

    def _begin(self, script: Script) -> tuple[int, Transcript]:
        episode = self._pool.open(script.prompt, self._seed, self._replies.put)
        reply = self._wait()
        if isinstance(reply, Opened):
            return episode, Transcript(words=reply.words)
        assert isinstance(reply, Failed)
        return episode, Transcript(failed=reply)

    def _go_on(self, episode: int, transcript: Transcript, turn: str) -> Transcript:
        if transcript.failed is not None or any(each.done for each in transcript.answers):
            return transcript
        self._pool.act(episode, turn, self._replies.put)
        reply = self._wait()
        if isinstance(reply, Answered):
            return attrs.evolve(transcript, answers=(*transcript.answers, reply))
        assert isinstance(reply, Failed)
        return attrs.evolve(transcript, failed=reply)

    def _wait(self) -> Reply:
        while True:
            try:
                return self._replies.get(timeout=_CHECK_S)
            except queue.Empty:
                self._check()

    def _check(self) -> None:
        try:
            self._pool.check()
        except CosmosError as error:
            fault(f"a worker process could not load the environment: {error}")


_TICK_S: Final = 0.01


@attrs.frozen(kw_only=True)
class Hosted:
    """Side effects of playing some dialogues.

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
