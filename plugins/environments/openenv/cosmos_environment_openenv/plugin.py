"""The environment `openenv`: dialogues with an OpenEnv server.

Each turn of the model is one action, which `action` makes of its text; what the server observes is written as text by
`observation`. The server's rewards and its `done` are the turn's.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.errors import DataError, PluginError
from cosmos_core.protocols import Environment, EnvironmentCapabilities, EnvironmentContext, Provider, Turn, hookimpl
from cosmos_core.types import JSON, Prompt
from cosmos_environment_openenv import templates
from cosmos_environment_openenv.connection import Answer, Connection, FullError, LostError, ServerError

_SEEDS: Final = 1 << 31
_PAUSE_S: Final = 0.1
_READERS: Final[Mapping[str, Callable[[str], JSON]]] = {
    "text": str,
    "number": templates.number,
    "json": templates.json_object,
}
_ROW: Final = ("prompt", "reference", "metadata", "seed")
_ANSWER: Final = ("observation", "reward")


def _are_urls(_: object, attribute: attrs.Attribute[Any], value: Sequence[str]) -> None:
    for url in value:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
            raise ValueError(f"{attribute.name}: {url!r} is no address of a server, such as http://localhost:8000")
    if not value:
        raise ValueError(f"{attribute.name}: there is no address; give at least one")


def _of(known: Sequence[str]) -> Any:
    """A validator of templates: what they name is known."""

    def check_names(_: object, attribute: attrs.Attribute[Any], value: JSON) -> None:
        for name in templates.names(value):
            if name not in known:
                there = ", ".join(f"{{{each}}}" for each in known)
                raise ValueError(f"{attribute.name}: nothing is called {{{name}}} here; there are {there}")

    return check_names


def _has_turn(_: object, attribute: attrs.Attribute[Any], value: Mapping[str, JSON]) -> None:
    if value and not {*templates.names(value)}:
        raise ValueError(f"{attribute.name}: {value!r} has nothing of the turn; add {{text}}, {{number}} or {{json}}")


@attrs.frozen(kw_only=True)
class OpenEnvOptions:
    """The servers, and what becomes of turns and observations."""

    urls: tuple[str, ...] = option(
        help="Addresses of servers of the same environment; an episode begins where this process has the fewest.",
        validator=_are_urls,
    )
    action: Mapping[str, JSON] = option(
        factory=dict,
        help="What is sent: `{text}` stands for the turn, `{number}` for the last number in its last line, `{json}` "
        "for the first JSON object in it. Absent: that object itself.",
        validator=check.and_(_has_turn, _of([*_READERS])),
    )
    observation: str = option(
        "{observation}\n",
        help="What the model is shown: `{observation}`, or fields of it (`{observation.board}`), and `{reward}`.",
        validator=_of(_ANSWER),
    )
    reset: Mapping[str, JSON] = option(
        factory=dict,
        help="What the reset is given besides `seed`; `{prompt}`, `{reference}`, and `{metadata.NAME}` are the row's.",
        validator=_of(_ROW),
    )
    refusals: tuple[str, ...] = option(
        ("VALIDATION_ERROR",),
        help="Errors of the server that say that an action is none: the model is told, and the episode goes on.",
        validator=check.deep_iterable(check.in_(("VALIDATION_ERROR", "EXECUTION_ERROR"))),
    )
    invalid_reward: float = option(0.0, help="Reward of a turn that is no action, or one that the server refuses.")
    deterministic: bool = option(
        False,
        help="Whether the same seed and actions always lead to the same: a lost episode is then played again.",
    )
    retries: int = option(2, help="Times that a lost connection is replaced, for each turn.", validator=check.ge(0))
    timeout_s: float = option(
        4.0, help="Seconds for each answer of the server, and for a connection.", validator=check.gt(0.0)
    )
    full_s: float = option(5.0, help="Seconds for which full servers are asked again.", validator=check.ge(0.0))


class OpenEnv:
    """One episode. `load` counts those that this process has on each server."""

    def __init__(self, options: OpenEnvOptions, load: Counter[str]) -> None:
        self._options: Final = options
        self._load: Final = load
        self._given: dict[str, JSON] = {}
        self._words: str | None = None
        self._played: Final[list[tuple[Mapping[str, JSON], Turn]]] = []
        self._connection: Connection | None = None
        self._url = ""

    async def reset(self, prompt: Prompt, seed: int) -> str | None:
        """The first observation."""
        row: Mapping[str, JSON] = {
            "prompt": prompt.text if isinstance(prompt.text, str) else prompt.text[-1].content,
            "reference": prompt.reference,
            "metadata": dict(prompt.metadata),
            "seed": seed % _SEEDS,
        }
        try:
            self._given = {"seed": row["seed"]} | {
                name: templates.filled(each, row) for name, each in self._options.reset.items()
            }
        except templates.AbsentError as error:
            raise DataError(f"environment.options.reset: {error}") from error
        await self._insist(None)
        return self._words

    async def step(self, text: str) -> Turn:
        """Take the action of a turn; one that has none, or whose action is refused, is told why."""
        try:
            action = self._action(text)
        except ValueError as error:
            return self._refused(str(error))
        turn = await self._insist(action)
        self._played.append((action, turn))
        return turn

    async def close(self) -> None:
        """Hang up; the server closes its environment."""
        connection, self._connection = self._connection, None
        if self._url:
            self._load[self._url] -= 1
            self._url = ""
        if connection is not None:
            await connection.close()

    def _action(self, text: str) -> Mapping[str, JSON]:
        template = self._options.action or "{json}"
        action = templates.filled(template, {name: _READERS[name](text) for name in {*templates.names(template)}})
        assert isinstance(action, Mapping)
        return action

    async def _insist(self, action: Mapping[str, JSON] | None) -> Turn:
        """Take an action, or only begin: on another connection where one is lost, and where that can make up for it."""
        avoid, lost, until = set[str](), 0, time.monotonic() + self._options.full_s
        while True:
            try:
                if self._connection is None:
                    await self._restore(avoid)
                return Turn(observation="") if action is None else await self._take(action)
            except FullError:
                if time.monotonic() > until:
                    raise
            except LostError as error:
                lost += 1
                if lost > self._options.retries:
                    raise
                if self._played and not self._options.deterministic:
                    raise LostError(
                        f"{error}; its episode is gone with it. If the same seed and actions always lead to the same, "
                        "environment.options.deterministic = true has it played again"
                    ) from error
            avoid.add(self._url)
            await self.close()
            await asyncio.sleep(_PAUSE_S * 2**lost)

    async def _restore(self, avoid: set[str]) -> None:
        """Connect, and play what has been played."""
        options = self._options
        # Ties are drawn: every process would begin with the first otherwise.
        self._url = min(options.urls, key=lambda url: (url in avoid, self._load[url], random.random()))  # noqa: S311
        self._load[self._url] += 1
        self._connection = await Connection.open(self._url, options.timeout_s)
        answer = await self._connection.ask("reset", self._given, options.timeout_s)
        if answer.done:
            raise PluginError(f"{self._url}: the episode is over when it begins; see environment.options.reset")
        words = self._shown(answer)
        again = [await self._take(action) for action, _ in self._played]
        if self._words is not None and (words, again) != (self._words, [turn for _, turn in self._played]):
            raise PluginError(
                f"{self._url}: the lost episode was played again, and the same seed and {len(again)} actions got other "
                "answers than the model has seen; retries are of use only where these decide everything"
            )
        self._words = words

    async def _take(self, action: Mapping[str, JSON]) -> Turn:
        assert self._connection is not None
        try:
            answer = await self._connection.ask("step", action, self._options.timeout_s)
        except ServerError as error:
            if error.code not in self._options.refusals:
                raise
            return self._refused(error.said)
        said = self._shown(answer)
        return Turn(observation=said, done=answer.done, reward=answer.reward, detail=f"{answer.reward:g}")

    def _refused(self, why: str) -> Turn:
        return Turn(
            observation=f"no action: {why}\n", reward=self._options.invalid_reward, detail=f"no action: {why:.80}"
        )

    def _shown(self, answer: Answer) -> str:
        values: Mapping[str, JSON] = {"observation": dict(answer.observation), "reward": answer.reward}
        try:
            return templates.shown(templates.filled(self._options.observation, values))
        except templates.AbsentError as error:
            raise PluginError(f"{self._url}: environment.options.observation: {error}") from error


@hookimpl
def cosmos_environment() -> Provider[Environment]:
    """The provider hook."""
    load = Counter[str]()

    def create(options: OpenEnvOptions, context: EnvironmentContext) -> OpenEnv:  # noqa: ARG001 - all are given one
        return OpenEnv(options, load)

    return Provider(
        create=create,
        options=OpenEnvOptions,
        capabilities=EnvironmentCapabilities(rewards=True, deterministic=False),
    )
