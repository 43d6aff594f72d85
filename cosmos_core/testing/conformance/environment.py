"""The kit for environments."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

import attrs
import pytest

from cosmos_core.config.schema import EnvironmentConfig
from cosmos_core.protocols import Environment, EnvironmentCapabilities, EnvironmentContext, Kind
from cosmos_core.rollout.episodes.messages import Answered, Opened
from cosmos_core.rollout.episodes.pool import EnvironmentPool
from cosmos_core.testing.conformance.plugin import Make, fault, fault_if
from cosmos_core.testing.conformance.worker import ENDLESS, GARBLED, METADATA, Answer, Ask, WorkerConformance, WorkerRun
from cosmos_core.types import JSON, Message, Prompt

_QUESTION: Final = "What is 34 times 56?"
_RIGHT: Final = "#### 1904"
_TIMES: Final = 3
_BLOCKED_S: Final = 2.0


@attrs.frozen(kw_only=True)
class Script:
    """A row, and the model's turns, as far as the environment asks for them."""

    prompt: Prompt
    turns: tuple[str, ...]


async def _side_effects(make: Make, scripts: Sequence[Script]) -> list[str]:
    """Play dialogues one after the other, on one event loop as in a worker, and tell of what they did to others."""
    problems = list[str]()
    for script in scripts:
        what = EnvironmentConformance.shown(script)
        prompt, pauses = copy.deepcopy(script.prompt), [0.0]
        beating = asyncio.ensure_future(beat(pauses))
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
            problems.append(
                f"{what} held up the event loop, and all other dialogues of the worker, for {max(pauses):.1f} s; put "
                "what blocks into `await asyncio.to_thread(…)`"
            )
        if prompt != script.prompt:
            problems.append(f"{what} changed its row; work on a copy")
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if names := sorted(getattr(task.get_coro(), "__qualname__", repr(task)) for task in others):
        problems.append(f"tasks go on after `close`: {', '.join(names[:3])}; cancel them and wait for their end")
    return problems


async def beat(pauses: list[float]) -> None:
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
    inputs: ClassVar[str] = "scripts"
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
        plain = Prompt(text=_QUESTION, reference="1904", metadata=copy.deepcopy(METADATA))
        words = (Message(role="system", content="Be brief."), Message(role="user", content=_QUESTION))
        plays = [(plain, turn) for turn in (*self.turns, _RIGHT, *GARBLED, *ENDLESS)]
        plays.append((attrs.evolve(plain, text=words), _RIGHT))
        return tuple(Script(prompt=prompt, turns=(turn,) * _TIMES) for prompt, turn in plays)

    @staticmethod
    def shown(given: Script) -> str:
        """A dialogue in a message."""
        turn = given.turns[0] if given.turns else ""
        text = turn if len(turn) <= 60 else f"{turn[:50]}… ({len(turn)} long)"
        return f"the dialogue of {text!r}"

    def pool(self, options: Mapping[str, JSON], seed: int) -> EnvironmentPool:
        """Workers of the environment."""
        config = EnvironmentConfig(plugin=self.plugin, options=options, timeout_s=self.timeout_s)
        return EnvironmentPool(config, seed=seed)

    def answer(self, ask: Ask, pool: EnvironmentPool, seed: int, given: Script) -> Answer:
        """The first words of a dialogue, and of each turn (observation, role, done, reward, media, places)."""
        said: tuple[Any, ...] = ()
        reply, episode = ask(pool.open, given.prompt, seed)
        failure, timed_out = "", False
        for turn in (*given.turns, None):
            match reply:
                case Opened(words=words):
                    said = (words,)
                case Answered():
                    shown = (reply.media, reply.places)
                    said = (*said, (reply.observation, reply.role, reply.done, reply.reward, *shown))
                case failed:
                    failure, timed_out = failed.detail or "it failed", failed.timed_out
            if turn is None or failure or (isinstance(reply, Answered) and reply.done):
                break
            reply, _ = ask(pool.act, episode, turn)
        pool.forget(episode)
        return Answer(said=said, failure=failure, timed_out=timed_out)

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
        beside = in_worker(scripts, at_once=True).answers
        for script, alone, among in zip(scripts, sound_run.answers, beside, strict=True):
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
        """The documentation of the environment promises these answers."""
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
