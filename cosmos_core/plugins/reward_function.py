"""A reward that is a plain function: it names what it needs, and is called with that, for one completion or a batch."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Final

from cosmos_core.errors import DataError
from cosmos_core.plugins.batching import Batcher
from cosmos_core.protocols import Completion, Reward, RewardCapabilities, Score
from cosmos_core.threads import awaitable, begin
from cosmos_core.types import Payload, Prompt

_BATCH: Final = 64
_GATHER_S: Final = 0.005
_GIVEN: Final[Mapping[str, Callable[[Completion], Any]]] = {
    "prompt": lambda completion: completion.prompt.words,
    "completion": lambda completion: completion.text,
    "reference": lambda completion: completion.prompt.reference,
    "truncated": lambda completion: completion.truncated,
    "num_units": lambda completion: completion.num_units,
    "frames": lambda completion: _array(completion.media, "frames"),
    "latents": lambda completion: _array(completion.payload, "sample"),
}
"""Names of parameters that a completion gives; every other one is a column of the row (`Prompt.metadata`)."""
_MANY: Final = {"prompts": "prompt", "completions": "completion", "references": "reference"}
"""Names that ask for lists: a function with one of them scores a batch, and each of its other names is a list, too."""


def _array(payload: Payload | None, name: str) -> Any:
    if payload is None or name not in payload.arrays:
        raise DataError(f"the completion has no {name}")
    found = payload.arrays[name]
    # Most processes that score text need no numpy, which takes a fifth of their start.
    return import_module("numpy").frombuffer(found.data, found.dtype).reshape(found.shape)


def capabilities_of(function: Callable[..., Any]) -> RewardCapabilities:
    """The payloads that a function scores, by its parameters; a TypeError says why it cannot be a reward."""
    parameters = inspect.signature(function).parameters
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    if strange := [str(each) for each in parameters.values() if each.kind in by_place]:
        raise TypeError(f"it takes {', '.join(strange)}; a reward is called by names, such as (prompt, completion)")
    names = {_MANY.get(name, name) for name in parameters}
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if "solution_str" in names:
        raise TypeError("it takes solution_str, as verl's rewards do; wrap it as docs/guides/from-verl.md shows")
    if not takes_all and not names & {"completion", "frames", "latents"}:
        raise TypeError(
            f"it takes {', '.join(parameters) or 'nothing'}; a reward takes completion (or completions, for a batch), "
            "or of a world model frames or latents, and besides prompt, reference and columns of the row"
        )
    if parameters.keys() & _MANY and parameters.keys() & set(_MANY.values()):
        raise TypeError(
            f"it takes {', '.join(parameters)}: names of one completion and of many; take those of one kind"
        )
    media = {"frames": "media", "latents": "latents"}
    return RewardCapabilities(
        payload_kinds=frozenset(media[each] for each in media if each in names) or frozenset({"tokens"})
    )


def reward_of(function: Callable[..., Any], options: Mapping[str, Any], name: str) -> Reward:
    """The reward of a function with its options (keyword-only parameters); `name` is the recipe's, for messages."""
    is_batched = bool(inspect.signature(function).parameters.keys() & _MANY)
    is_awaited = inspect.iscoroutinefunction(function)
    kind = _Batched if is_batched else _Awaited if is_awaited else _Single
    return kind(function, options, name)


class _Single:
    """A plain function of one completion."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any], name: str) -> None:
        self._function: Final = function
        self._options: Final = options
        self._name: Final = name
        parameters = inspect.signature(function).parameters.values()
        asked = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        self._needed: Final = {_MANY.get(each.name, each.name): each.default for each in asked}
        self._takes_all: Final = any(each.kind is each.VAR_KEYWORD for each in parameters)

    def vet(self, prompt: Prompt) -> None:
        """Refuse a row without a column that the function needs, by a DataError."""
        for name, default in self._needed.items():
            if default is inspect.Parameter.empty and name not in _GIVEN and name not in prompt.metadata:
                raise DataError(
                    f"reward {self._name}: the function takes {name!r}, a column that the row does not have (it has "
                    f"{', '.join(prompt.metadata) or 'none'}); name it in dataset.options.metadata (a dataset function "
                    "gives it as a key of the row), or give a default"
                )

    def score(self, completion: Completion) -> Any:
        """Call the function."""
        return self._scored(self._function(**self._arguments(completion), **self._options))

    def _arguments(self, completion: Completion) -> dict[str, Any]:
        self.vet(completion.prompt)
        columns = completion.prompt.metadata
        found = {name: default for name, default in self._needed.items() if name not in _GIVEN} | {
            name: columns[name] for name in columns if name in self._needed or self._takes_all
        }
        given = {*self._needed, *(("prompt", "completion", "reference") if self._takes_all else ())}
        return found | {name: _GIVEN[name](completion) for name in given if name in _GIVEN}

    def _scored(self, value: Any) -> Any:
        """A score as the run takes it: of a table, `score` counts, and the rest is shown beside it."""
        if value is None:
            raise DataError(f"reward {self._name}: the function returned None: no score for this completion")
        if not isinstance(value, Mapping):
            return value
        if "score" not in value:
            raise DataError(f"reward {self._name}: the function returned {value!r:.200}, which has no 'score'")
        return Score(value=value["score"], details={str(name): each for name, each in value.items() if name != "score"})


class _Awaited(_Single):
    """A coroutine function of one completion."""

    async def score(self, completion: Completion) -> Any:
        """Await the function."""
        return self._scored(await self._function(**self._arguments(completion), **self._options))


class _Batched(_Single):
    """A function of lists, of what arrives within moments; a plain one gets one batch at a time, in a thread."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any], name: str) -> None:
        super().__init__(function, options, name)
        self._batcher: Final = Batcher[dict[str, Any], Any](self._run, size=_BATCH, wait_s=_GATHER_S)
        self._turn: Final = asyncio.Lock()

    async def score(self, completion: Completion) -> Any:
        """Score it together with others."""
        return self._scored(await self._batcher.put(self._arguments(completion)))

    async def _run(self, items: Sequence[dict[str, Any]]) -> Sequence[Any]:
        names = dict.fromkeys(name for item in items for name in item)
        plural = {one: many for many, one in _MANY.items()}
        arguments = {plural.get(name, name): [item.get(name) for item in items] for name in names}
        call = functools.partial(self._function, **arguments, **self._options)
        if inspect.iscoroutinefunction(self._function):
            scores = await call()
        else:
            async with self._turn:
                try:
                    scores = await asyncio.wrap_future(begin(awaitable(call), "batch"))
                except SystemExit as error:
                    raise DataError(f"reward {self._name}: the function raised SystemExit: {error}") from error
        # A function that returns one has imported them.
        arrays: Any = getattr(sys.modules.get("numpy"), "ndarray", ())
        found = list(scores) if isinstance(scores, (Sequence, arrays)) else scores
        if not isinstance(found, list) or len(found) != len(items):
            raise DataError(
                f"reward {self._name}: the function returned {scores!r:.200} for {len(items)} completions; it returns "
                "a list with a score for each"
            )
        return found
