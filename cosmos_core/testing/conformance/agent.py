"""The kit for agents: environments that call the model."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Final

import attrs
import pytest

from cosmos_core.config.schema import AgentConfig, EnvironmentConfig
from cosmos_core.protocols import EnvironmentCapabilities, EnvironmentContext, Kind
from cosmos_core.rollout.endpoint.calls import Call, CallError, Choice, Reply
from cosmos_core.rollout.endpoint.server import Endpoint
from cosmos_core.rollout.episodes.calling import AgentSession, Clients, done_by
from cosmos_core.rollout.episodes.messages import Begin, Ended, is_reward
from cosmos_core.rollout.episodes.pool import EnvironmentPool
from cosmos_core.testing.conformance.environment import beat
from cosmos_core.testing.conformance.plugin import Make, fault, fault_if
from cosmos_core.testing.conformance.worker import ENDLESS, GARBLED, METADATA, Answer, Ask, WorkerConformance, WorkerRun
from cosmos_core.types import JSON, Message, Prompt

_MOST_CALLS: Final = 6
_BLOCKED_S: Final = 2.0
_LIMIT: Final = "all calls of the kit were made"


@attrs.frozen(kw_only=True)
class Task:
    """A row, and what the model says to the agent, over and over."""

    prompt: Prompt
    replies: tuple[Message, ...]


class ScriptedModel:
    """Answers the calls of sessions by their scripts, and refuses those beyond a limit, as a run does."""

    names = ("kit",)

    def __init__(self) -> None:
        self.said: Final[dict[str, list[Any]]] = {}
        self.rewards: Final[dict[tuple[str, Any], float]] = {}
        self.late_s = 0.0
        self._scripts: Final[dict[str, Sequence[Message]]] = {}
        self._numbers: Final = itertools.count()

    def begin(self, replies: Sequence[Message]) -> str:
        """Begin a session; its name."""
        name = f"session-{next(self._numbers)}"
        self._scripts[name], self.said[name] = replies, []
        return name

    def call(self, session: str, call: Call) -> Future[Reply]:
        """Answer a call."""
        future: Future[Reply] = Future()
        calls = self.said[session]
        if len(calls) >= _MOST_CALLS:
            future.set_exception(CallError(400, _LIMIT, code="max_turns"))
            return future
        message = self._scripts[session][len(calls) % len(self._scripts[session])]
        known = {tool["function"]["name"] for tool in call.tools}  # type: ignore[index,call-overload] # read by the endpoint
        if not all(each.name in known for each in message.tool_calls):
            message = attrs.evolve(message, tool_calls=())  # as a run does with calls of what there is not
        calls.append([turn.content for turn in call.messages if turn.role != "assistant"])
        reason = "tool_calls" if message.tool_calls else "stop"
        named = tuple(attrs.evolve(each, id=f"call_{len(calls)}_{i}") for i, each in enumerate(message.tool_calls))
        choice = Choice(message=attrs.evolve(message, tool_calls=named), reason=reason, num_units=1)
        choices = (choice,) * call.num_choices
        reply = Reply(id=str(len(calls)), model="kit", created=0, choices=choices, num_prompt_units=1)
        threading.Timer(self.late_s, future.set_result, [reply]).start()
        return future

    def reward(self, session: str, value: Any, reply: Any) -> Future[None]:
        """Take a reward, of the session or of a reply."""
        future: Future[None] = Future()
        if is_reward(value):
            self.rewards[session, reply] = float(value)
            future.set_result(None)
        else:
            future.set_exception(CallError(400, f"reward: {value!r:.80} is no finite number", param="reward"))
        return future

    def refused(self) -> None:
        """Nothing is counted."""


class _Pool(EnvironmentPool):
    """Workers, and the endpoint that they call."""

    def __init__(self, config: EnvironmentConfig, seed: int) -> None:
        super().__init__(config, seed=seed)
        self.model: Final = ScriptedModel()
        self.endpoint: Final = Endpoint(self.model, "127.0.0.1")

    def start(self) -> None:
        self.endpoint.start()
        super().start()

    def close(self) -> None:
        super().close()
        self.endpoint.close()


class AgentConformance(WorkerConformance):
    """Tests that every agent must pass: an end, in time, whatever a model says to it.

    Set `plugin`, and what else the defaults do not do for.

    Attributes:
        timeout_s: Seconds that a task may take.
        replies: Replies of the model that mean something to the agent, such as a call of a tool.

    Fixtures to override: `options`, the options to test with; `tasks`, which must all come to an end. The default ones
    have all of `replies`, one after the other, each of them over and over, and garbled ones of every kind.
    """

    kind: ClassVar[Kind] = "environment"
    inputs: ClassVar[str] = "tasks"
    inputs_failed: ClassVar[str] = "tasks failed"
    purity: ClassVar[str] = "draw from the seed of the session"
    timeout_s: ClassVar[float] = 30.0
    replies: ClassVar[Sequence[Message]] = ()

    @pytest.fixture
    def context(self) -> EnvironmentContext:
        """An agent's context."""
        return EnvironmentContext(name=self.plugin, seed=0)

    @pytest.fixture
    def prompt(self) -> Prompt:
        """The row of the default tasks."""
        return Prompt(text="What is 34 times 56?", reference="1904", metadata=copy.deepcopy(METADATA))

    @pytest.fixture
    def tasks(self, prompt: Prompt) -> Sequence[Task]:
        """Tasks in which the model says one thing over and over."""
        said = [Message(role="assistant", content=text) for text in (*GARBLED, *ENDLESS)]
        each = [Task(prompt=prompt, replies=(reply,)) for reply in (*self.replies, *said)]
        return (*([Task(prompt=prompt, replies=tuple(self.replies))] if self.replies else []), *each)

    @staticmethod
    def shown(given: Task) -> str:
        """A task in a message."""
        first = given.replies[0]
        calls = ", ".join(call.name for call in first.tool_calls)
        return f"the task in which the model says {f'a call of {calls}' if calls else repr(first.content)[:60]}"

    def pool(self, options: Mapping[str, JSON], seed: int) -> EnvironmentPool:
        """Workers of the agent, and an endpoint."""
        agent = AgentConfig(timeout_s=self.timeout_s)
        return _Pool(EnvironmentConfig(plugin=self.plugin, options=options, agent=agent), seed)

    def answer(self, ask: Ask, pool: Any, seed: int, given: Task) -> Answer:
        """The words of the agent to the model, call by call, and its reward."""
        name = pool.model.begin(given.replies)
        begin = Begin(
            episode=-1,
            prompt=given.prompt,
            seed=seed,
            base_url=f"{pool.endpoint.url}/s/{name}/v1",
            key=name,
            model="kit",
        )
        reply, episode = ask(pool.begin, begin)
        pool.forget(episode)
        said = pool.model.said[name]
        if isinstance(reply, Ended):
            told = {of: value for (session, of), value in pool.model.rewards.items() if session == name}
            told |= {} if reply.reward is None else {None: reply.reward}
            return Answer(said=(*map(repr, said), sum(told.values()) if told else None))
        # Who met a limit may raise: that sample is truncated.
        if not reply.timed_out and len(said) >= _MOST_CALLS:
            return Answer(said=tuple(map(repr, said)))
        return Answer(failure=reply.detail or "it failed", timed_out=reply.timed_out)

    def test_an_agent_calls_the_model(self, sound_run: WorkerRun, tasks: Sequence[Task]) -> None:
        """A session without a reply is no sample."""
        for task, answer in zip(tasks, sound_run.answers, strict=True):
            if answer is not None and not [each for each in answer.said if isinstance(each, str)]:
                fault(f"{self.shown(task)} ended without a call of the model")

    def test_rewards_are_declared(
        self, capabilities: EnvironmentCapabilities, sound_run: WorkerRun, tasks: Sequence[Task]
    ) -> None:
        """Undeclared rewards are not counted: planning refuses a recipe that weighs them."""
        if not capabilities.calls_model:
            fault("it does not say that it calls the model; declare EnvironmentCapabilities(calls_model=True)")
        for task, answer in zip(tasks, sound_run.answers, strict=True):
            given = answer is not None and bool(answer.said) and isinstance(answer.said[-1], float | int)
            if given and not capabilities.rewards:
                fault(f"{self.shown(task)} gave a reward; declare EnvironmentCapabilities(rewards=True)")

    @pytest.mark.usefixtures("sound_run")
    def test_tasks_do_not_disturb_each_other(self, make: Make, tasks: Sequence[Task]) -> None:
        """All agents of a worker share its event loop, and those of a group their row."""
        fault_if(asyncio.run(self._side_effects(make, tasks)))

    async def _side_effects(self, make: Make, tasks: Sequence[Task]) -> list[str]:
        """Do tasks one after the other, on one event loop as in a worker, and tell of what they did to others."""
        problems, model = list[str](), ScriptedModel()
        endpoint = Endpoint(model, "127.0.0.1")
        endpoint.start()
        clients = Clients()
        try:
            # What the first one imports holds up a worker once, and is no fault.
            for index, task in enumerate([*tasks[:1], *tasks]):
                name, prompt, pauses = model.begin(task.replies), copy.deepcopy(task.prompt), [0.0]
                session = AgentSession(
                    base_url=f"{endpoint.url}/s/{name}/v1", key=name, model="kit", seed=0, clients=clients
                )
                model.late_s = _BLOCKED_S + 0.5 if index == 1 else 0.0
                beating = asyncio.ensure_future(beat(pauses))
                await asyncio.sleep(0)
                with contextlib.suppress(Exception):  # who met a limit may raise
                    await done_by(make(), session, prompt)
                beating.cancel()
                await asyncio.wait({beating})
                if index and max(pauses) > _BLOCKED_S:
                    problems.append(
                        f"{self.shown(task)} held up the event loop, and all other agents of the worker, for "
                        f"{max(pauses):.1f} s; put what blocks, such as a client that is not async, into "
                        "`await asyncio.to_thread(…)`"
                    )
                if prompt != task.prompt:
                    problems.append(f"{self.shown(task)} changed its row; work on a copy")
        finally:
            await clients.close()
            endpoint.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if names := sorted(getattr(task.get_coro(), "__qualname__", repr(task)) for task in others):
            problems.append(f"tasks go on after `run`: {', '.join(names[:3])}; cancel them and wait for their end")
        return problems
