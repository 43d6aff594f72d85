"""The kit for environments."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final

import attrs
import pytest

from cosmos_core.config.schema import EnvironmentConfig
from cosmos_core.protocols import Environment, EnvironmentCapabilities, EnvironmentContext, Kind
from cosmos_core.rollout.episodes.messages import Answered, Opened, Reply
from cosmos_core.rollout.episodes.pool import EnvironmentPool
from cosmos_core.testing.conformance.plugin import Make, fault, fault_if
from cosmos_core.testing.conformance.worker import Answer, WorkerConformance, WorkerRun, next_of
from cosmos_core.types import JSON, Message, Prompt

_QUESTION: Final = "What is 34 times 56?"
_GARBLED: Final = (
    "#### 1904",
    "",
    " \n\t\n",
    "Ответ — 1904 ✅, 世界 🧮, e\u0301, \u200b٨",
    '{"answer": [8, "\\boxed{8 \\frac{ $ ]}',
    "\x00\x1b[31m8\x7f",
    "9" * 5000,
    "34*56=1904 and " * 1000,
)
_TIMES: Final = 3
_BLOCKED_S: Final = 2.0


@attrs.frozen(kw_only=True)
class Script:
    """A row, and the model's turns, as far as the environment asks for them."""

    prompt: Prompt
    turns: tuple[str, ...]


class _Dialogues:
    """Plays dialogues with the environments of a pool, as many side by side as it is given.

    An answer says the first words, and of each turn (observation, role, done, reward).
    """

    def __init__(self, pool: EnvironmentPool, seed: int) -> None:
        self._pool, self._seed = pool, seed
        self._replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()

    def play(self, scripts: Sequence[Script]) -> list[Answer]:
        begun = [
            (self._pool.open(script.prompt, self._seed, self._replies.put), self._reply(Answer())) for script in scripts
        ]
        for turns in itertools.zip_longest(*(script.turns for script in scripts)):
            begun = [
                (episode, self._go_on(episode, answer, turn))
                for turn, (episode, answer) in zip(turns, begun, strict=True)
            ]
        for episode, _ in begun:
            self._pool.forget(episode)
        return [answer for _, answer in begun]

    def _go_on(self, episode: int, answer: Answer, turn: str | None) -> Answer:
        is_done = len(answer.said) > 1 and answer.said[-1][2]
        if answer.failure or is_done or turn is None:
            return answer
        self._pool.act(episode, turn, self._replies.put)
        return self._reply(answer)

    def _reply(self, answer: Answer) -> Answer:
        match next_of(self._replies, self._pool, "environment"):
            case Opened(words=words):
                return attrs.evolve(answer, said=(words,))
            case Answered() as reply:
                turn = (reply.observation, reply.role, reply.done, reply.reward)
                return attrs.evolve(answer, said=(*answer.said, turn))
            case failed:
                return attrs.evolve(answer, failure=failed.detail or "it failed", timed_out=failed.timed_out)


async def _side_effects(make: Make, scripts: Sequence[Script]) -> list[str]:
    """Play dialogues one after the other, on one event loop as in a worker, and tell of what they did to others."""
    changed, blocked = list[str](), list[str]()
    for script in scripts:
        what = EnvironmentConformance.shown(script)
        prompt, pauses = copy.deepcopy(script.prompt), [0.0]
        beating = asyncio.ensure_future(_beat(pauses))
        await asyncio.sleep(0)
        environment: Environment = make()
        await environment.reset(prompt, 0)
        for turn in script.turns:
            if (await environment.step(turn)).done:
                break
        await environment.close()
        beating.cancel()
        await asyncio.wait({beating})
        if max(pauses) > _BLOCKED_S:
            blocked.append(
                f"{what} held up the event loop, and all other dialogues of the worker, for {max(pauses):.1f} s; put "
                "what blocks into `await asyncio.to_thread(…)`"
            )
        if prompt != script.prompt:
            changed.append(f"{what} changed its row; work on a copy")
    others = asyncio.all_tasks() - {asyncio.current_task()}
    names = sorted(getattr(task.get_coro(), "__qualname__", repr(task)) for task in others)
    left = f"tasks go on after `close`: {', '.join(names[:3])}; cancel them and wait for their end"
    return [*blocked, *([left] if names else ()), *changed]


async def _beat(pauses: list[float]) -> None:
    """Note how long it is between one turn on the event loop and the next, the one that goes on at the end included."""
    last = time.monotonic()
    while True:
        try:
            await asyncio.sleep(0.01)
        finally:
            now = time.monotonic()
            pauses.append(now - last)
            last = now


class EnvironmentConformance(WorkerConformance):
    """Tests that every environment must pass: an answer to whatever a model writes, in time, in the workers of a run.

    Set `plugin`, and what else the defaults do not do for.

    Attributes:
        timeout_s: Seconds that an answer may take; the recipe's default.
        turns: Turns of the model that mean something to the environment, such as a call of a tool.
        examples: Dialogues: a row, the model's turns, and the observations that they must get, None where none comes.

    Fixtures to override: `options`, the options to test with; `scripts`, ordinary dialogues that must all go their
    way. The default ones have each of `turns`, and garbled ones of every kind, three times over.
    """

    kind: ClassVar[Kind] = "environment"
    inputs_failed: ClassVar[str] = "dialogues failed"
    purity: ClassVar[str] = "draw from the seed that `reset` is given"
    turns: ClassVar[Sequence[str]] = ()
    examples: ClassVar[Sequence[tuple[Prompt, Sequence[str], Sequence[str | None]]]] = ()

    @pytest.fixture
    def context(self) -> EnvironmentContext:
        """An environment's context."""
        return EnvironmentContext(name=self.plugin, seed=0)

    @pytest.fixture
    def scripts(self) -> Sequence[Script]:
        """Dialogues of which each has one turn over and over, of rows of plain text and of a chat."""
        metadata: dict[str, JSON] = {"source": "conformance kit", "tags": ["arithmetic", "kit"], "steps": {"number": 2}}
        plain = Prompt(text=_QUESTION, reference="1904", metadata=metadata)
        words = (Message(role="system", content="Be brief."), Message(role="user", content=_QUESTION))
        plays = [(plain, turn) for turn in (*self.turns, *_GARBLED)]
        plays.append((attrs.evolve(plain, text=words), _GARBLED[0]))
        return tuple(Script(prompt=prompt, turns=(turn,) * _TIMES) for prompt, turn in plays)

    @pytest.fixture
    def ordinary(self, scripts: Sequence[Script]) -> Sequence[Script]:
        """The same, to be had in a worker."""
        return scripts

    @staticmethod
    def shown(given: Script) -> str:
        """A dialogue in a message."""
        turn = given.turns[0] if given.turns else ""
        text = turn if len(turn) <= 60 else f"{turn[:50]}… ({len(turn)} long)"
        return f"the dialogue of {text!r}"

    def answers(
        self, options: Mapping[str, JSON], seed: int, inputs: Sequence[Script], *, at_once: bool
    ) -> list[Answer | None]:
        """What a worker says in dialogues, one after the other or in turns."""
        found: list[Answer | None] = []
        config = EnvironmentConfig(plugin=self.plugin, options=options, timeout_s=self.timeout_s)
        with contextlib.closing(EnvironmentPool(config, seed=seed)) as pool:
            pool.start()
            dialogues = _Dialogues(pool, seed)
            for scripts in [inputs] if at_once else [[script] for script in inputs]:
                found += (answers := dialogues.play(scripts))
                # What hangs once may hang in every dialogue, and each would take its time.
                if any(answer.timed_out for answer in answers):
                    break
        return found + [None] * (len(inputs) - len(found))

    def test_dialogues_do_not_disturb_each_other(
        self,
        capabilities: EnvironmentCapabilities,
        sound_run: WorkerRun,
        scripts: Sequence[Script],
        in_worker: Callable[..., WorkerRun],
        make: Make,
    ) -> None:
        """All dialogues of a worker share its event loop, and those of a group their row."""
        fault_if(asyncio.run(_side_effects(make, scripts)))
        if not capabilities.deterministic:
            return
        for script, alone, among in zip(
            scripts, sound_run.answers, in_worker(scripts, at_once=True).answers, strict=True
        ):
            if alone is not None and among is not None and alone.said != among.said:
                fault(
                    f"{self.shown(script)} got {among.said!r:.200} among others, and {alone.said!r:.200} alone; keep "
                    "the state of a dialogue in its own instance"
                )

    def test_rewards_are_declared(
        self, capabilities: EnvironmentCapabilities, sound_run: WorkerRun, scripts: Sequence[Script]
    ) -> None:
        """Undeclared rewards are not counted: planning refuses a recipe that weighs them."""
        if capabilities.rewards:
            pytest.skip("declared: rewards")
        for script, answer in zip(scripts, sound_run.answers, strict=True):
            given = [turn[3] for turn in answer.said[1:] if turn[3]] if answer is not None else []
            if given:
                fault(
                    f"{self.shown(script)} got a reward of {given[0]:g}, which no run would count; declare "
                    "EnvironmentCapabilities(rewards=True)"
                )

    def test_the_examples_get_their_answers(self, in_worker: Callable[..., WorkerRun]) -> None:
        """Its documentation promises them."""
        if not self.examples:
            pytest.skip("not given: `examples`, dialogues with the observations that they must get")
        scripts = [Script(prompt=prompt, turns=tuple(turns)) for prompt, turns, _ in self.examples]
        for script, answer, (_, _, expected) in zip(scripts, in_worker(scripts).answers, self.examples, strict=True):
            if answer is None or answer.failure:
                why = "another example took too long" if answer is None else answer.failure
                fault(f"{self.shown(script)} has no answers: {why}")
            found = [turn[0] for turn in answer.said[1:]]
            if found != list(expected):
                fault(f"{self.shown(script)} got {found!r:.300}, and `examples` says {list(expected)!r:.300}")
