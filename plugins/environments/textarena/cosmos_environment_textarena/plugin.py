"""The environment `textarena`: dialogues in games of the TextArena package, of one player or of two.

Each turn of the model is a move, which the game reads by itself. The model is shown what the game has told it since, an
invalid move included. Its reward in the game comes with the last turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import difflib
import importlib
import random
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.errors import ConfigError, PluginError
from cosmos_core.protocols import Environment, EnvironmentCapabilities, EnvironmentContext, Provider, Turn, hookimpl
from cosmos_core.types import JSON, Prompt

_SEEDS: Final = 1 << 31
_MOST_MOVES: Final = 1000
_BRACKETED: Final = re.compile(r"\[[^\[\]\n]{1,40}\]")
_DATA: Final = {"words": "corpora", "averaged_perceptron_tagger_eng": "taggers"}
_DRAWS: Final = threading.Lock()
"""Held by whoever has put a game's state into the module `random`, from which all games draw."""


@attrs.frozen(kw_only=True)
class TextArenaOptions:
    """The game, and who plays it."""

    id: str = option(help="Name of the game, as `textarena.make` takes it; of one player or of two.")
    arguments: Mapping[str, JSON] = option(factory=dict, help="Further arguments of `textarena.make`.")
    rules: bool = option(True, help="Whether the game's own rules are shown; not, where the row's prompt says them.")
    last_line: bool = option(False, help="Whether only the last line of a turn is the move.")
    invalid_reward: float | None = option(
        None,
        help="Reward of a game that an invalid move of the model ends; absent: the game's own, which may be high.",
    )
    player: int = option(0, help="The model's number in a game of two.", validator=check.and_(check.ge(0), check.le(1)))
    opponent: Literal["random", "script"] | None = option(
        None,
        help='Who else plays a game of two: `"random"` makes moves that the game takes, `"script"` the `moves` in '
        "their order, over and over, and in place of one that the game refuses the next one.",
    )
    moves: tuple[str, ...] = option(
        (), help="The opponent's moves; where there are none, a random one has all in brackets that the game has shown."
    )

    def __attrs_post_init__(self) -> None:
        if self.opponent is None and (self.moves or self.player):
            raise ValueError("`moves` and `player` are of games of two; set `opponent` as well")
        if self.opponent == "script" and not self.moves:
            raise ValueError('`opponent` is "script", and there are no `moves`; give them')


class TextArena:
    """One game."""

    def __init__(self, options: TextArenaOptions, context: EnvironmentContext) -> None:  # noqa: ARG002 - all are given one
        self._options: Final = options
        self._library: Final = _library()
        self._game: Any = None
        self._inner: Any = None
        self._drawn: Any = None
        self._num_answers = 0
        _check_game(self._library, options.id)

    async def reset(self, prompt: Prompt, seed: int) -> str | None:  # noqa: ARG002 - the task is the game's
        """The game as it begins, with its rules; the same for the same seed."""
        return await asyncio.to_thread(self._begin, seed % _SEEDS)

    async def step(self, text: str) -> Turn:
        """Make a move, and have the opponent answer."""
        return await asyncio.to_thread(self._answer, text)

    async def close(self) -> None:
        """There is nothing to let go of."""

    @property
    def _state(self) -> Any:
        return self._inner.state

    def _begin(self, seed: int) -> str | None:
        self._drawn = random.Random(seed).getstate()  # noqa: S311 - a game
        with self._own_draws():
            self._game = self._inner = _made(self._library, self._options)
            while isinstance(self._inner, self._library.Wrapper):
                self._inner = self._inner.env
            self._check_players(seed)
            if self._others_move(is_over=False):
                raise PluginError(f"environment.options.id: {self._options.id!r} is over before the model's first turn")
            return self._told() or None

    def _check_players(self, seed: int) -> None:
        """Reset the game, if it is one of as many as play."""
        alone = self._options.opponent is None
        said = ""
        try:
            self._game.reset(num_players=1 if alone else 2, seed=seed)
        except (AssertionError, ValueError) as error:
            said = f" ({error})"
        kind = self._library.SinglePlayerState if alone else self._library.TwoPlayerState
        if said or not isinstance(self._state, kind):
            raise ConfigError(
                f"environment.options.opponent: {self._options.opponent!r}, and {self._options.id!r} is no game of "
                f"{'one' if alone else 'two'}{said}; games of one have none, those of two have 'random' or 'script'. "
                "Games of more, and opponents that are models, are not available"
            )

    def _answer(self, text: str) -> Turn:
        lines = text.strip().splitlines()
        move = text if not self._options.last_line else lines[-1] if lines else ""
        with self._own_draws():
            is_over, _ = self._game.step(action=move)
            is_over = self._others_move(is_over=is_over)
        told = self._state.observations[self._options.player]
        refused = any(kind is self._library.ObservationType.GAME_ADMIN for _, _, kind in told)
        if not is_over:
            return Turn(observation=self._told(), detail="invalid move" if refused else "")
        mine = self._state.game_info[self._options.player]
        reward = (self._state.rewards or {}).get(self._options.player, 0.0)
        if mine["invalid_move"] and self._options.invalid_reward is not None:
            reward = self._options.invalid_reward
        if not isinstance(reward, int | float):  # some games mix up reward and reason
            raise PluginError(
                f"environment.options.id: the reward of {self._options.id!r} is no number but {reward!r:.80}; "
                "environment.options.invalid_reward is that of invalid moves"
            )
        why = mine.get("reason")
        return Turn(observation=self._told(), done=True, reward=float(reward), detail=f"{reward:g}: {why}")

    def _others_move(self, *, is_over: bool) -> bool:
        """Have the opponent move until it is the model's turn; whether the game is over then."""
        for _ in range(_MOST_MOVES):
            if is_over or self._state.current_player_id == self._options.player:
                return is_over
            is_over, _ = self._inner.step(action=self._others_choice())
        raise PluginError(
            f"environment.options.id: {self._options.id!r}: {_MOST_MOVES} moves, and no turn of the model"
        )

    def _others_choice(self) -> str:
        """A move of the opponent: the first one that a copy of the game takes."""
        other = self._state.current_player_id
        for move in (moves := self._others_moves(other)):
            trial = copy.deepcopy(self._inner)
            trial.step(action=move)
            is_error = trial.state.error_count > self._state.error_count
            if not is_error and not trial.state.game_info[other]["invalid_move"]:
                return move
        raise PluginError(
            f"environment.options.moves: {self._options.id!r} takes none of the opponent's {len(moves)} moves "
            f"({', '.join(moves):.200}); give those that the game knows"
        )

    def _others_moves(self, other: int) -> Sequence[str]:
        moves = list(self._options.moves)
        if self._options.opponent == "script":
            place = self._num_answers % len(moves)
            self._num_answers += 1
            return moves[place:] + moves[:place]
        said = self._state.observations[other]
        told = "\n".join(message for sender, message, _ in said if sender == self._library.GAME_ID)
        moves = moves or list(dict.fromkeys(_BRACKETED.findall(told)))
        random.shuffle(moves)  # the game's own draws
        return moves

    def _told(self) -> str:
        """What the game has told the model since its last turn; of boards only the last one."""
        mine, library = self._options.player, self._library
        new, self._state.observations[mine] = self._state.observations[mine], []
        kinds = library.ObservationType
        boards = [place for place, (_, _, kind) in enumerate(new) if kind is kinds.GAME_BOARD]
        lines = []
        for place, (sender, message, kind) in enumerate(new):
            own = sender == mine and kind is kinds.PLAYER_ACTION
            if own or place in boards[:-1] or (kind is kinds.PROMPT and not self._options.rules):
                continue
            named = "" if sender == library.GAME_ID else f"[{self._state.role_mapping.get(sender, sender)}] "
            lines.append(f"{named}{message}\n")
        return "".join(lines)

    @contextlib.contextmanager
    def _own_draws(self) -> Iterator[None]:
        """Within, the module `random` is as this game left it, and no other game draws from it."""
        with _DRAWS:
            others = random.getstate()
            random.setstate(self._drawn)
            try:
                yield
            finally:
                self._drawn = random.getstate()
                random.setstate(others)


def _library() -> Any:
    try:
        return importlib.import_module("textarena")
    except ImportError as error:
        raise ConfigError(
            f"environment.plugin: 'textarena' needs its package ({error}); "
            "pip install 'cosmos-environment-textarena[library]'"
        ) from error


def _check_game(library: Any, name: str) -> None:
    """Refuse a game that there is not, and one that would use the network."""
    games = library.envs.registration.ENV_REGISTRY
    if name not in games:
        close = difflib.get_close_matches(name, games, 3)
        raise ConfigError(
            f"environment.options.id: textarena has no game {name!r}"
            + (f"; did you mean {', '.join(close)}?" if close else "; see textarena.pprint_registry_detailed()")
        )
    # The module is not imported: many download when they are.
    package, *parts = games[name].entry_point.partition(":")[0].split(".")
    module = Path(library.__file__).parent.joinpath(*parts).with_suffix(".py")
    source = module.read_text() if package == "textarena" and module.exists() else ""
    if "OpenRouter" in source:
        raise ConfigError(
            f"environment.options.id: {name!r} asks a model of OpenRouter, which is not available in a run"
        )
    named = " ".join(re.findall(r"nltk\.download\([^)]*\)", source)) + (
        "words" if "EnglishDictionary" in source else ""
    )
    if absent := [data for data in _DATA if data in named and not _has(data)]:
        raise ConfigError(
            f"environment.options.id: {name!r} needs data of nltk that is not on this machine, and a run downloads "
            f"nothing: python -m nltk.downloader {' '.join(absent)}"
        )


def _has(data: str) -> bool:
    try:
        importlib.import_module("nltk").data.find(f"{_DATA[data]}/{data}")
    except LookupError:
        return False
    return True


def _made(library: Any, options: TextArenaOptions) -> Any:
    try:
        return library.make(options.id, **options.arguments)
    except Exception as error:
        raise ConfigError(
            f"environment.options.id: textarena cannot make {options.id!r}: {type(error).__name__}: {error}"
        ) from error


@hookimpl
def cosmos_environment() -> Provider[Environment]:
    """The provider hook."""
    return Provider(
        create=TextArena,
        options=TextArenaOptions,
        # Some games draw from more than the module `random`.
        capabilities=EnvironmentCapabilities(rewards=True, deterministic=False),
    )
