"""The entry point `reasoning-gym`: entries that are generated when they are asked for."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.data import BadRowError, is_held_out
from cosmos_core.data.options import Template
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.protocols import Dataset, DatasetCapabilities, DatasetContext, Provider, Split, hookimpl
from cosmos_core.types import JSON, Message, Prompt
from cosmos_dataset_reasoning_gym.library import entry_as_json, make_task

HELDOUT_SHARE: Final = 0.2
"""Share of the questions, by a hash of them, that only the held-out split contains."""
_TRIES: Final = {"train": 10, "heldout": 100}
"""Entries of the task that a row may be made of: none of them is in its split with a probability below 1e-6."""


def _shows(name: str) -> Any:
    def validate(_: object, attribute: attrs.Attribute[Any], value: str) -> None:
        if Template(value).fields != {name}:
            raise ValueError(f"{attribute.name}: {value!r} must show {{{name}}}, and nothing else in braces")

    return validate


@attrs.frozen(kw_only=True)
class Part:
    """One task of a mixture."""

    task: str = option(help="Name of the task.")
    weight: float = option(1.0, help="Its share of the rows, relative to the others'.", validator=check.gt(0.0))
    config: Mapping[str, JSON] = option(factory=dict, help="The task's own options.")


@attrs.frozen(kw_only=True)
class ReasoningGymOptions:
    """Options of `reasoning-gym`."""

    task: str | None = option(None, help="Name of the task, such as `chain_sum`.")
    config: Mapping[str, JSON] = option(factory=dict, help="The task's own options.")
    tasks: tuple[Part, ...] = option((), help="Several tasks instead, tables of `task`, `weight` and `config`.")
    train_rows: int = option(2000, help="Rows of the train split.", validator=check.ge(1))
    heldout_rows: int = option(200, help="Rows of the held-out split.", validator=check.ge(0))
    prompt: str = option("{question}\n", help="Template of the prompt.", validator=_shows("question"))
    chat: bool = option(False, help="Whether `prompt` is a user's turn, for the model's chat template.")
    system: str | None = option(None, help="A system turn to begin every chat with.")
    demonstration: str = option(
        "<answer>{answer}</answer>", help="Template of the demonstration.", validator=_shows("answer")
    )
    careless: float = option(
        0.0,
        help="Share of the demonstrations that give `guess` for an answer, for demos.",
        validator=check.and_(check.ge(0.0), check.le(1.0)),
    )
    guess: str = option("0", help="Answer of careless demonstrations.")

    def __attrs_post_init__(self) -> None:
        if (self.task is None) == (not self.tasks):
            raise ValueError("give either `task` or `tasks`")
        if self.tasks and self.config:
            raise ValueError("`config` is of `task`; each of `tasks` has its own")
        if self.system is not None and not self.chat:
            raise ValueError("`system` needs `chat = true`: a plain text prompt has no turns")


class ReasoningGym:
    """The dataset. No question is in both splits.

    Row n of a split that has N is made of the first of the entries n, n + N, n + 2N, … whose question belongs to the
    split, so that each entry is used once.

    Raises:
        ConfigError: A task does not exist, cannot be made, or cannot be verified from JSON.
    """

    def __init__(self, options: ReasoningGymOptions, context: DatasetContext) -> None:
        self._options: Final = options
        self._seed: Final = context.seed
        self._sizes: Final[dict[Split, int]] = {"train": options.train_rows, "heldout": options.heldout_rows}
        one = () if options.task is None else (Part(task=options.task, config=options.config),)
        self._parts: Final = options.tasks or one
        self._weights: Final = [part.weight for part in self._parts]
        self._prompt: Final = Template(options.prompt)
        self._demonstration: Final = Template(options.demonstration)
        self._lock: Final = threading.Lock()
        paths = [f"{context.key_path}.tasks.{number}" for number in range(len(options.tasks))] or [context.key_path]
        self._tasks: Final = [self._made(part, path) for part, path in zip(self._parts, paths, strict=True)]

    def size(self, split: Split) -> int:
        """Number of rows."""
        return self._sizes[split]

    def row(self, split: Split, index: int) -> Prompt:
        """Generate row `index` of the split.

        Raises:
            IndexError: `index` is not in `range(size(split))`.
            DataError: No entry of its own belongs to the split, or JSON cannot hold the entry.
        """
        if not 0 <= index < self.size(split):
            raise IndexError(f"reasoning-gym: row {index} of split {split!r}, which has {self.size(split)}")
        rng = random.Random(f"{self._seed}:{split}:{index}")  # noqa: S311 - rows, not secrets
        (number,) = rng.choices(range(len(self._parts)), self._weights)
        part = self._parts[number]
        made = entry_as_json(self._entry(number, split, index), part.task)
        careless = rng.random() < self._options.careless
        answer = self._options.guess if careless else made["answer"]
        return Prompt(
            text=self._text(made),
            reference={"task": part.task, "config": dict(part.config), "entry": made},
            demonstration=self._demonstration.fill({"answer": answer}) if isinstance(answer, str) else None,
            metadata={"part": part.task},
        )

    def _text(self, entry: Mapping[str, JSON]) -> str | tuple[Message, ...]:
        try:
            text = self._prompt.fill(entry)
        except BadRowError as error:
            raise DataError(f"reasoning-gym: an entry cannot be shown: {error}") from error
        if not self._options.chat:
            return text
        system = self._options.system
        turns = () if system is None else (Message(role="system", content=system),)
        return (*turns, Message(role="user", content=text))

    def _entry(self, number: int, split: Split, index: int) -> dict[str, Any]:
        """The first of a row's entries whose question belongs to the split."""
        task, tries = self._tasks[number], _TRIES[split]
        for candidate in range(index, index + tries * self.size(split), self.size(split)):
            with self._lock, _numpy_as_it_was():
                entry: dict[str, Any] = task[candidate]
            if is_held_out(entry["question"], HELDOUT_SHARE) == (split == "heldout"):
                return entry
        raise DataError(
            f"reasoning-gym: none of {tries} entries of task {self._parts[number].task!r} for row {index} has a "
            f"question of the {split} split; it has too few different ones with {dict(self._parts[number].config)!r}"
        )

    def _made(self, part: Part, path: str) -> Any:
        # Entry i of a task with the seed s is drawn from s + i: seeds of runs that are neighbours must lie far apart.
        digest = hashlib.blake2b(f"{self._seed}:{part.task}".encode(), digest_size=4).digest()
        size = max(_TRIES[split] * number for split, number in self._sizes.items())
        task = make_task(part.task, part.config, path, seed=int.from_bytes(digest, "big") >> 1, size=size)
        with _numpy_as_it_was():
            entry = task[0]
            is_alike = _score(task, entry) == _score(task, entry_as_json(entry, part.task))
        if not is_alike:
            raise ConfigError(
                f"{path}.task: the verifier of {part.task!r} scores an entry otherwise once it has been JSON, as it is "
                "in rewards; take another task"
            )
        return task


def _score(task: Any, entry: Mapping[str, Any]) -> Any:
    return task.score_answer(entry["answer"], entry)


@contextlib.contextmanager
def _numpy_as_it_was() -> Iterator[None]:
    """Restore numpy's global generator: some tasks seed it for each entry."""
    numpy: Any = sys.modules["numpy"]
    state = numpy.random.get_state()
    try:
        yield
    finally:
        numpy.random.set_state(state)


@hookimpl
def cosmos_dataset() -> Provider[Dataset]:
    """Provide the tasks of reasoning-gym."""
    capabilities = DatasetCapabilities(demonstrations=True, references=True)
    return Provider(create=ReasoningGym, options=ReasoningGymOptions, capabilities=capabilities)
