"""Orders for processes in other pods, in a folder that all pods share: what to run under a name, and how it ended.

A supervisor and the pods of its replicas agree on a session, which no other start of the run has; the orders of others
are in folders of their own. Every file is written whole or not at all, by one writer:

`<name>.order`   the supervisor's newest order: start it, or (`spec` absent) kill it
`<name>.taken`   the pod's note of the order that it is about to carry out: it is not carried out again
`<name>.ended`   the pod's answer, once the process of an order has ended, or could not be
`over`           the supervisor's last word: end what runs, and go
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final, TypeVar

import attrs
import cattrs

from cosmos_core.errors import ReplicaError
from cosmos_core.protocols import Exit, ProcessSpec

SESSION: Final = "COSMOS_LAUNCH_SESSION"
"""Environment variable of every pod: the session."""

_OVER: Final = "over"
_CONVERTER: Final = cattrs.Converter(forbid_extra_keys=True)


@attrs.frozen(kw_only=True)
class Order:
    """Start a process, or kill it where `spec` is None; `number` counts the orders of a name from 1."""

    number: int
    spec: ProcessSpec | None


@attrs.frozen(kw_only=True)
class Ended:
    """The end of an order's process."""

    number: int
    exit: Exit


@attrs.frozen(kw_only=True)
class _Taken:
    number: int


_T = TypeVar("_T", Order, Ended, _Taken)


class Orders:
    """One session's orders.

    Args:
        directory: The run's folder.
        session: The session; letters, digits, `-` and `.`.

    Raises:
        ReplicaError: The session is none.
    """

    def __init__(self, directory: Path, session: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][-A-Za-z0-9.]*", session):
            raise ReplicaError(
                f"{SESSION}={session!r} is no session; pods get it from the labels of their JobSet, which needs JobSet "
                "0.7 or newer"
            )
        self._folder: Final = directory / "orders" / session

    def open(self) -> None:
        """Make the folder."""
        self._folder.mkdir(parents=True, exist_ok=True)

    def give(self, name: str, order: Order) -> None:
        """Leave an order for whoever runs `name`."""
        self._write(f"{name}.order", order)

    def newest(self, name: str) -> Order | None:
        """The newest order for a name; None before any."""
        return self._read(f"{name}.order", Order)

    def take(self, name: str, number: int) -> None:
        """Note that the order of a number is about to be carried out."""
        self._write(f"{name}.taken", _Taken(number=number))

    def taken(self, name: str) -> int:
        """Number of the order of a name that was taken last; 0 before any."""
        found = self._read(f"{name}.taken", _Taken)
        return 0 if found is None else found.number

    def tell(self, ended: Ended) -> None:
        """Say how the process of an order ended."""
        self._write(f"{ended.exit.name}.ended", ended)

    def ended(self, name: str) -> Ended | None:
        """The end of the last process of a name; None while none has."""
        return self._read(f"{name}.ended", Ended)

    def end(self) -> None:
        """Say that all is over."""
        self._write(_OVER, None)

    @property
    def is_over(self) -> bool:
        """True if all is over."""
        return (self._folder / _OVER).exists()

    def _write(self, file: str, data: Order | Ended | _Taken | None) -> None:
        path = self._folder / file
        draft = path.with_name(f".{file}.partial")
        try:
            draft.write_text(json.dumps(_CONVERTER.unstructure(data)), encoding="utf-8")
            draft.replace(path)
        except OSError as error:
            raise ReplicaError(f"{path}: an order cannot be written: {error.strerror}") from error

    def _read(self, file: str, kind: type[_T]) -> _T | None:
        path = self._folder / file
        try:
            return _CONVERTER.structure(json.loads(path.read_text(encoding="utf-8")), kind)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, cattrs.BaseValidationError) as error:
            raise ReplicaError(f"{path}: no {kind.__name__.lower().strip('_')} that can be read: {error}") from error
