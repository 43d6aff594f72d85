"""The dataset `verifiers-tasks`: the tasks of a taskset of the verifiers library, as rows that name them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.data import is_held_out
from cosmos_core.errors import ConfigError
from cosmos_core.protocols import Dataset, DatasetCapabilities, DatasetContext, Provider, Split, hookimpl
from cosmos_core.types import JSON, Message, Prompt
from cosmos_environment_verifiers.library import tasks


@attrs.frozen(kw_only=True)
class TasksOptions:
    """Options of `verifiers-tasks`."""

    taskset: Mapping[str, JSON] = option(
        help="The table of the environment, `environment.options.env.taskset`: `id` and options."
    )
    rows: int | None = option(
        None, help="The first so many tasks only; one without end needs it.", validator=check.optional(check.ge(1))
    )
    heldout_share: float = option(
        0.1,
        help="Share of the tasks, by a hash of what they are, of the held-out split.",
        validator=check.and_(check.ge(0.0), check.lt(1.0)),
    )


class VerifiersTasks:
    """The dataset. All tasks are loaded when it is made.

    Raises:
        ConfigError: The taskset cannot be made, or has no end.
        DataError: A task of it cannot be loaded.
    """

    def __init__(self, options: TasksOptions, context: DatasetContext) -> None:
        path = f"{context.key_path}.taskset"
        known = tasks(options.taskset, path)
        if options.rows is None and not known.taskset.bounded:
            raise ConfigError(f"{context.key_path}.rows: the taskset has no end; say how many of its tasks are rows")
        self._rows: Final[dict[Split, list[Any]]] = {"train": [], "heldout": []}
        for task in known.first(options.rows):
            about = json.dumps(task.data.model_dump(mode="json", exclude={"idx"}), sort_keys=True)
            self._rows["heldout" if is_held_out(about, options.heldout_share) else "train"].append(task)

    def size(self, split: Split) -> int:
        """Number of rows."""
        return len(self._rows[split])

    def row(self, split: Split, index: int) -> Prompt:
        """Row `index` of the split: what its task says first, and which it is.

        Raises:
            IndexError: `index` is not in `range(size(split))`.
        """
        if not 0 <= index < self.size(split):
            raise IndexError(f"verifiers-tasks: row {index} of split {split!r}, which has {self.size(split)}")
        task = self._rows[split][index]
        system = task.data.system_prompt
        turns = () if system is None else (Message(role="system", content=system),)
        return Prompt(
            text=(*turns, Message(role="user", content=task.data.prompt_text)),
            metadata={"task": task.data.idx, "key": task.key},
        )


@hookimpl
def cosmos_dataset() -> Provider[Dataset]:
    """Provide the tasks of verifiers."""
    return Provider(create=VerifiersTasks, options=TasksOptions, capabilities=DatasetCapabilities(references=False))
