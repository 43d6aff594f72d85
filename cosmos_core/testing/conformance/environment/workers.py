"""Dialogues as a run has them: with environments in worker processes, each answer under its time limit."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Sequence
from typing import Final

import attrs

from cosmos_core.config.schema import EnvironmentConfig
from cosmos_core.errors import CosmosError
from cosmos_core.rollout.episodes.pool import EnvironmentPool
from cosmos_core.rollout.episodes.wire import Answered, Failed, Opened, Reply
from cosmos_core.testing.conformance.environment.dialogues import Script
from cosmos_core.testing.conformance.leftovers import marked
from cosmos_core.testing.conformance.plugin import fault

_CHECK_S: Final = 0.2


@attrs.frozen(kw_only=True)
class Transcript:
    """What an environment said in one dialogue.

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
    """What a worker made of some dialogues.

    Attributes:
        transcripts: Of each; None for those that were not begun after a timeout.
        leftovers: Command lines of the processes that outlived the worker.
    """

    transcripts: tuple[Transcript | None, ...]
    leftovers: tuple[str, ...]

    @property
    def is_sound(self) -> bool:
        """Whether every dialogue went its way and nothing is left."""
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
