"""A process in which environments and agents run: `python -m cosmos_core.rollout.episodes.worker FD`.

Each episode is an instance of its own, and what it is asked a coroutine beside those of the others. An episode that is
over and goes on all the same, in a thread or in its `close`, cannot be ended: past a number of these, the worker ends.
At the end of its life a worker closes what is open, and waits a moment for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import resource
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, ParamSpec, TypeVar

from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Agent, Environment, EnvironmentContext, Turn
from cosmos_core.rollout.episodes.calling import AgentSession, Clients, done_by
from cosmos_core.rollout.episodes.messages import (
    END_S,
    FROM_WORKER,
    STUCK_EXIT,
    TO_WORKER,
    Act,
    Answered,
    Began,
    Begin,
    Close,
    Ended,
    Failed,
    Open,
    Opened,
    Question,
    Setup,
    is_reward,
)
from cosmos_core.rollout.workers import process
from cosmos_core.rollout.workers.process import Ready, live, shown, traced
from cosmos_core.threads import awaitable
from cosmos_core.types import Message

_MOST: Final = 4096
"""Threads, more than a worker has dialogues: one is started only where all others are busy, so that no call waits."""

_EPISODE: Final[contextvars.ContextVar[int | None]] = contextvars.ContextVar("episode", default=None)

P = ParamSpec("P")
T = TypeVar("T")


@contextlib.contextmanager
def of_episode(episode: int) -> Iterator[None]:
    """Within, calls and tasks that are begun are this episode's."""
    token = _EPISODE.set(episode)
    try:
        yield
    finally:
        _EPISODE.reset(token)


class EpisodeThreads(ThreadPoolExecutor):
    """Threads behind `asyncio.to_thread` in a worker, each call with the episode that it works for.

    A call that has begun cannot be cancelled: who awaits it can only cease to wait. So what goes on is remembered.
    """

    def __init__(self) -> None:
        super().__init__(max_workers=_MOST, thread_name_prefix="environment")
        self._guard: Final = threading.Lock()
        self._going: Final[dict[Future[Any], int | None]] = {}

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call something in a thread, for the episode of this context."""
        future: Future[T] = super().submit(awaitable(fn), *args, **kwargs)
        with self._guard:
            self._going[future] = _EPISODE.get()
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: Future[T]) -> None:
        with self._guard:
            self._going.pop(future, None)

    def of(self, episode: int) -> list[Future[Any]]:
        """The calls of an episode that go on."""
        with self._guard:
            return [future for future, whose in self._going.items() if whose == episode]

    @property
    def num_going(self) -> int:
        """Calls that go on."""
        with self._guard:
            return len(self._going)


_LOG: Final = logging.getLogger(__name__)
_MOST_STUCK: Final = 8
"""Episodes that are over and go on; each costs a thread, and perhaps a share of every other episode's time."""
_LONGEST: Final = 1 << 20
"""Characters of an observation; no context takes more, and every one of them is held by three processes."""

_MOST_MEDIA: Final = 1 << 25
"""Characters of what an observation shows, all `data:` URLs together."""


class Worker(process.Worker):
    """Runs the episodes of one replica."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection, TO_WORKER, FROM_WORKER)
        self._episodes: dict[int, Environment] = {}
        self._clients = Clients()
        self._answering: dict[int, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._calls = EpisodeThreads()
        self._stuck: dict[int, asyncio.Task[None]] = {}
        self._is_leaving = False

    async def serve(self) -> None:
        """Load the environment, then answer until the other side closes.

        Raises:
            CosmosError: The plugin is missing, broken or refuses its options.
        """
        asyncio.get_running_loop().set_default_executor(self._calls)
        try:
            async for message in self.messages():
                if isinstance(message, Setup):
                    self._load(message)
                elif self._is_leaving:
                    continue  # the replica says that it is lost, once this process has ended
                elif isinstance(message, Close):
                    self._begin_close(message.episode)
                else:
                    self._answering[message.episode] = asyncio.ensure_future(self._answer(message))
        finally:
            await self._close_all()
        if self._closing or self._stuck or self._calls.num_going:
            _leave(0)

    def _load(self, setup: Setup) -> None:
        config = setup.environment
        plugins = PluginSet.load([("environment", config.plugin)])
        context = EnvironmentContext(name=config.label, seed=setup.seed)

        def make() -> Environment:
            made: Environment = plugins.create("environment", config.plugin, config.options, context)
            return made

        make()  # what is wrong with the options is wrong with every episode
        self._make, self._timeout_s, self._agent_timeout_s = make, config.timeout_s, config.agent.timeout_s
        if config.agent.memory_gb is not None:
            # Of what a process takes for itself: maps of files and of other processes are not counted.
            most = int(config.agent.memory_gb * 1e9)
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        self.send(Ready())

    async def _answer(self, message: Question) -> None:
        self.send(Began(episode=message.episode))
        timeout_s = self._agent_timeout_s if isinstance(message, Begin) else self._timeout_s
        deadline = asyncio.timeout(timeout_s)
        try:
            with of_episode(message.episode):
                async with deadline:
                    reply = await self._reply(message)
        except (Exception, asyncio.CancelledError) as error:  # any plugin error is an answer: it cannot go on
            # What a plugin awaits may be cancelled though nobody asked for the end of this task.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # the episode is being closed
            late = deadline.expired()
            detail, place, trace = (f"no answer within {timeout_s:g} s", "", "") if late else traced(error)
            reply = Failed(episode=message.episode, timed_out=late, detail=detail, place=place, trace=trace)
        self.send(reply)

    async def _reply(self, message: Question) -> Opened | Answered | Ended | Failed:
        if isinstance(message, Begin):
            return await self._run(message)
        return await (self._open(message) if isinstance(message, Open) else self._act(message))

    async def _run(self, message: Begin) -> Ended | Failed:
        agent: Agent = self._make()  # type: ignore[assignment] # the plugin's capabilities say which it is
        session = AgentSession(
            base_url=message.base_url,
            key=message.key,
            model=message.model,
            seed=message.seed,
            clients=self._clients,
        )
        value = await done_by(agent, session, message.prompt)
        if value is not None and not is_reward(value):
            detail = f"run: the reward is no finite number but {value!r:.200}"
            return Failed(episode=message.episode, timed_out=False, detail=detail)
        return Ended(episode=message.episode, reward=None if value is None else float(value))

    async def _open(self, message: Open) -> Opened | Failed:
        environment = self._episodes[message.episode] = self._make()
        said: Any = await environment.reset(message.prompt, message.seed)
        if said is None:
            return Opened(episode=message.episode, words=None)
        words = said if isinstance(said, Message) else Message(role="user", content=said)
        problem = f"the role is {words.role!r:.200}, and the user speaks first" if words.role != "user" else ""
        if problem := problem or _unusable(words.content) or _unshown(words):
            return Failed(episode=message.episode, timed_out=False, detail=f"reset: {problem}")
        return Opened(episode=message.episode, words=words)

    async def _act(self, message: Act) -> Answered | Failed:
        turn: Any = await self._episodes[message.episode].step(message.text)
        if problem := _wrong(turn):
            return Failed(episode=message.episode, timed_out=False, detail=f"step: {problem}")
        return Answered(
            episode=message.episode,
            observation=turn.observation,
            role=turn.role,
            done=bool(turn.done),
            reward=float(turn.reward),
            detail=shown(str(turn.detail)),
            media=turn.media,
            places=turn.places,
        )

    # -- the end of episodes ------------------------------------------------------------------------------------------

    def _begin_close(self, episode: int) -> None:
        closing = asyncio.ensure_future(self._close(episode))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _close(self, episode: int) -> None:
        answering = self._answering.pop(episode, None)
        if answering is not None and answering.cancel():
            await asyncio.wait({answering}, timeout=self._timeout_s)
        environment = self._episodes.pop(episode, None)
        if environment is None and answering is None:
            return
        with of_episode(episode):
            # An agent is closed by its cancellation.
            closing = asyncio.ensure_future(_quietly(environment)) if environment is not None else answering
        assert closing is not None
        until = asyncio.get_running_loop().time() + self._timeout_s
        await asyncio.wait({closing}, timeout=self._timeout_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                calls = map(asyncio.wrap_future, self._calls.of(episode))
                await asyncio.gather(*calls, return_exceptions=True)
        if self._goes_on(episode, closing):
            await self._count(episode, closing)

    def _goes_on(self, episode: int, closing: asyncio.Task[None]) -> bool:
        return not closing.done() or bool(self._calls.of(episode))

    async def _count(self, episode: int, closing: asyncio.Task[None]) -> None:
        """Count an episode that is over and goes on; too many end this worker, which the replica replaces."""
        self._stuck[episode] = closing
        for ended in [each for each, task in self._stuck.items() if not self._goes_on(each, task)]:
            del self._stuck[ended]
        if len(self._stuck) > _MOST_STUCK:
            _LOG.error(
                "%d episodes go on %g s after they were closed, in threads or in `close`; this worker ends, and the "
                "others of its episodes with it",
                len(self._stuck),
                self._timeout_s,
            )
            self._is_leaving = True
            self._closing.discard(asyncio.current_task())  # it is the one that waits for the others
            await self._close_all()
            _leave(STUCK_EXIT)

    async def _close_all(self) -> None:
        """Close what is open, but for no longer than a replica waits."""
        for episode in {*self._episodes, *self._answering}:
            self._begin_close(episode)
        if self._closing:
            await asyncio.wait(self._closing, timeout=END_S)


async def _quietly(environment: Environment) -> None:
    """Close an environment whose sample has ended: what goes wrong here can change nothing any more."""
    with contextlib.suppress(Exception):
        await environment.close()


def _leave(code: int) -> None:
    """End this process; an ordinary end would wait for threads that hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _unusable(text: Any) -> str:
    """The reason why the model cannot be shown this; empty if it can."""
    if not isinstance(text, str):
        return f"the observation is no text but {text!r:.200}"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"the observation cannot be encoded: {error}"
    return f"an observation of {len(text)} characters; the longest is {_LONGEST}" if len(text) > _LONGEST else ""


def _unshown(said: Any) -> str:
    """The reason why the media of a turn, or their places, are none; empty if they are some."""
    media, places = said.media, said.places
    if not isinstance(media, tuple) or not all(isinstance(each, str) for each in media):
        return f"the media are no tuple of locations but {media!r:.200}"
    if not isinstance(places, tuple) or not all(type(each) is int for each in places):
        return f"the places of media are no tuple of integers but {places!r:.200}"
    size = sum(map(len, media))
    return f"media of {size} characters; the most are {_MOST_MEDIA}" if size > _MOST_MEDIA else ""


def _wrong(turn: Any) -> str:
    """Say what is wrong with what `step` returned; empty if nothing is."""
    if not isinstance(turn, Turn):
        return f"it returned no Turn but {turn!r:.200}"
    if turn.observation is None and not turn.done:
        return "it returned no observation, and the dialogue is not done"
    if not is_reward(turn.reward):
        return f"the reward is no finite number but {turn.reward!r:.200}"
    role: Any = turn.role
    if not isinstance(role, str) or not role.isidentifier() or role == "assistant":
        return f"the role is {role!r:.200}; name whose turn the observation is, such as 'user' or 'tool', not the model"
    return _unshown(turn) if turn.observation is None else _unusable(turn.observation) or _unshown(turn)


if __name__ == "__main__":
    live(Worker)
