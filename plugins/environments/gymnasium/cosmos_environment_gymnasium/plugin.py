"""The environment `gymnasium`: dialogues in an environment of the Gymnasium package.

Each turn of the model is one action: a number for a `Discrete` space, one of `actions` if these are named, several
numbers for a `Box`. Each observation is written as text, and with `render` shown as an image. The rewards of the
environment are the dialogue's.
"""

from __future__ import annotations

import asyncio
import base64
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar, cast

import attrs
import numpy as np
from PIL import Image

from cosmos_core.config import option
from cosmos_core.errors import ConfigError
from cosmos_core.protocols import Environment, EnvironmentCapabilities, EnvironmentContext, Provider, Turn, hookimpl
from cosmos_core.types import JSON, Message, Prompt

_NUMBER: Final = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
_SEEDS: Final = 1 << 31

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class GymnasiumOptions:
    """The environment, and the words in which it is shown."""

    id: str = option(help="Name of the environment, as `gymnasium.make` takes it.")
    arguments: Mapping[str, JSON] = option(factory=dict, help="Further arguments of `gymnasium.make`.")
    actions: tuple[str, ...] = option((), help="Names of the actions of a `Discrete` space, in its order.")
    observation: str = option("{observation}\n", help="What the model is shown; `{observation}` stands for the values.")
    digits: int = option(4, help="Significant digits of values.", validator=attrs.validators.ge(1))
    invalid_reward: float = option(0.0, help="Reward of a turn that is no action; the environment does not see it.")
    render: bool = option(False, help="Whether an image that the environment renders is shown with each observation.")
    render_side: int = option(
        512, help="Pixels of its longer side at most; a larger one is scaled down.", validator=attrs.validators.ge(1)
    )


class Gymnasium:
    """One episode.

    What is made of the package runs in one thread of its own, one thing after the other: nothing closes an
    environment in the middle of a step, and one that nobody waits for any more is closed once it is made.
    """

    def __init__(self, options: GymnasiumOptions, context: EnvironmentContext) -> None:  # noqa: ARG002 - all are given one
        if "{observation}" not in options.observation and not options.render:
            raise ConfigError(
                f"environment.options.observation: {options.observation!r} does not show the {{observation}}; add it, "
                "or set render = true"
            )
        if options.render and "render_mode" in options.arguments:
            raise ConfigError(
                f"environment.options.arguments.render_mode: {options.arguments['render_mode']!r}, but render = true "
                "takes 'rgb_array'; leave it out"
            )
        self._options: Final = options
        self._make: Final = _maker()
        self._environment: Any = None
        self._thread: Final = ThreadPoolExecutor(1, thread_name_prefix="gymnasium")

    async def reset(self, prompt: Prompt, seed: int) -> str | Message:  # noqa: ARG002 - the task is the environment's
        """The first observation; the same for the same seed."""
        seen, media = await self._in_order(lambda: self._began(seed % _SEEDS))
        words = self._shown(seen)
        return Message(role="user", content=words, media=media) if media else words

    async def step(self, text: str) -> Turn:
        """Take the action that the turn names; a turn that names none is answered with what is possible."""
        space = self._environment.action_space
        action = self._action(space, text)
        if action is None:
            said = f"no action: {self._possible(space)}\n"
            return Turn(observation=said, reward=self._options.invalid_reward, detail="no action")
        (seen, reward, terminated, truncated, _), media = await self._in_order(
            lambda: (self._environment.step(action), self._rendered())
        )
        return Turn(
            observation=self._shown(seen),
            done=bool(terminated or truncated),
            reward=float(reward),
            detail=f"{reward:g}",
            media=media,
        )

    async def close(self) -> None:
        """Close the environment."""
        try:
            await self._in_order(self._end)
        finally:
            self._thread.shutdown(wait=False)

    async def _in_order(self, call: Callable[[], T]) -> T:
        # Shielded: what is still to run must run even if nobody waits for it, `close` above all.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, call))

    def _began(self, seed: int) -> tuple[Any, tuple[str, ...]]:
        self._environment = self._made()
        self._check_actions(self._environment.action_space)
        seen, _ = self._environment.reset(seed=seed)
        return seen, self._rendered()

    def _rendered(self) -> tuple[str, ...]:
        """What the environment looks like now, as the location of a PNG; none unless it is to be rendered."""
        if not self._options.render:
            return ()
        try:
            frame = self._environment.render()
        except Exception as error:
            raise self._unseen(f"{type(error).__name__}: {error}") from error
        if not (isinstance(frame, np.ndarray) and frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3):
            modes = ", ".join(self._environment.metadata.get("render_modes") or ()) or "none"
            raise self._unseen(f"it gives {type(frame).__name__}, no array of colours; its render modes: {modes}")
        image, file = Image.fromarray(frame), io.BytesIO()
        image.thumbnail((self._options.render_side, self._options.render_side))
        image.save(file, format="PNG")
        return (f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}",)

    def _unseen(self, why: str) -> ConfigError:
        return ConfigError(
            f"environment.options.render: {self._options.id!r} cannot be rendered as 'rgb_array': {why}; set render = "
            "false, or use another environment"
        )

    def _end(self) -> None:
        if self._environment is not None:
            self._environment.close()

    def _check_actions(self, space: Any) -> None:
        names = self._options.actions
        if space.shape is None or space.dtype is None:
            raise ConfigError(
                f"environment.options.id: the actions of {self._options.id!r}, {space}, are no fixed count of numbers; "
                "use another environment, or wrap this one"
            )
        if names and not (_is_discrete(space) and len(names) <= space.n):
            raise ConfigError(
                f"environment.options.actions: {len(names)} names ({', '.join(names)}), but the actions of "
                f"{self._options.id!r} are {space}; name as many as a `Discrete` space has, or none"
            )

    def _made(self) -> Any:
        try:
            mode = {"render_mode": "rgb_array"} if self._options.render else {}
            return self._make(self._options.id, **mode, **self._options.arguments)
        except Exception as error:
            raise ConfigError(
                f"environment.options.id: gymnasium cannot make {self._options.id!r}: {type(error).__name__}: {error}"
            ) from error

    def _shown(self, seen: Any) -> str:
        return self._options.observation.replace("{observation}", _text(seen, self._options.digits))

    def _action(self, space: Any, text: str) -> Any:
        """The action in the last line of a turn; None if there is none that the space contains."""
        lines = text.strip().splitlines()
        said = lines[-1].strip() if lines else ""
        if self._options.actions:
            named = {name.lower(): index for index, name in enumerate(self._options.actions)}
            place = named.get(said.lower())
            return None if place is None else int(space.start) + place
        numbers = [float(number) for number in _NUMBER.findall(said)]
        return _fitting(space, numbers)

    def _possible(self, space: Any) -> str:
        return f"one of {', '.join(self._options.actions)}" if self._options.actions else str(space)


def _maker() -> Callable[..., Any]:
    try:
        import gymnasium  # noqa: PLC0415 - the extra of this environment alone
    except ImportError as error:
        raise ConfigError(
            f"environment.plugin: 'gymnasium' needs its package ({error}); pip install gymnasium"
        ) from error
    return cast("Callable[..., Any]", gymnasium.make)


def _is_discrete(space: Any) -> bool:
    """True if it is a `Discrete` space, the one whose actions are plain numbers from `start`."""
    return space.shape == () and hasattr(space, "start")


def _fitting(space: Any, numbers: Sequence[float]) -> Any:
    """Numbers as an action of a space; None if it contains none such."""
    shape = space.shape or ()
    if len(numbers) != math.prod(shape) or not np.isfinite(numbers).all():
        return None
    if np.issubdtype(space.dtype, np.integer):
        limits = np.iinfo(space.dtype)
        if any(number != int(number) or not limits.min <= int(number) <= limits.max for number in numbers):
            return None
        numbers = [int(number) for number in numbers]
    with np.errstate(over="ignore"):
        values = np.asarray(numbers, dtype=space.dtype).reshape(shape)
    action = int(values) if _is_discrete(space) else values
    return action if np.isfinite(values).all() and space.contains(action) else None


def _text(seen: Any, digits: int) -> str:
    """Values as text: numbers with so many digits, names before those of a `Dict`."""
    if isinstance(seen, Mapping):
        return ", ".join(f"{name}: {_text(value, digits)}" for name, value in seen.items())
    if isinstance(seen, str):
        return seen
    if isinstance(seen, tuple | list):
        return " ".join(_text(value, digits) for value in seen)
    if isinstance(seen, np.ndarray):
        return " ".join(_text(value, digits) for value in seen.reshape(-1).tolist())
    if isinstance(seen, float | np.floating):
        return f"{float(seen):.{digits}g}"
    return str(seen)


@hookimpl
def cosmos_environment() -> Provider[Environment]:
    """The provider hook."""
    return Provider(
        create=Gymnasium,
        options=GymnasiumOptions,
        # What `gymnasium.make` gives may draw from anything.
        capabilities=EnvironmentCapabilities(rewards=True, deterministic=False),
    )
