"""Snapshots in files: one for each of the newest checkpoints, so that a journal that is lost does not lose the run.

They lie in the run's folder, `recovery/step-N`: the SHA-256 of what follows, then the encoded snapshot. A snapshot is
written once the journal has what it is of. So one that is of more than the journal knows says that the journal lost it.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Final

from cosmos_core.config.checks import superseded
from cosmos_core.control.journal import RECOVER
from cosmos_core.control.machine import progress
from cosmos_core.control.machine.recovery import RECOVERY_SNAPSHOT, RecoverySnapshot, is_known, snapshot_of
from cosmos_core.control.machine.state import State
from cosmos_core.errors import DamagedJournalError, JournalError, TransportError
from cosmos_core.files import replace_file

_NAME: Final = re.compile(r"step-(\d+)")
_DIGEST_BYTES: Final = 32


class RecoverySnapshots:
    """Writes the snapshots of a run as it goes on; the newest `keep` stay, and the best one by evaluation."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder: Final = folder
        self._keep: Final = keep
        self._noted: set[tuple[int, bool, int]] = set()
        self._rollbacks: tuple[int, ...] | None = None

    def note(self, state: State) -> None:
        """Write what is new: a checkpoint that is wanted, and once more when it is there, with its evaluations.

        All of the state is durable. Snapshots of steps that were undone are removed first: they come again, with other
        weights. A DamagedJournalError says that the journal lost what a snapshot is of.
        """
        self._remove_undone(state)
        checkpoints = state.checkpoints
        wanted = {checkpoints.ordered, *checkpoints.saved} & state.marks.keys()
        due = {(step, step in checkpoints.saved, len(state.evaluations)) for step in sorted(wanted)[-1:]}
        if due <= self._noted:
            return
        self._noted = due
        for step, _, _ in due:
            self._write(snapshot_of(state, step))
        for step in superseded(kept(self._folder), self._keep, progress.best_checkpoint(state)):
            (self._folder / f"step-{step}").unlink(missing_ok=True)

    def _remove_undone(self, state: State) -> None:
        rollbacks = tuple(state.rollbacks)
        if rollbacks == self._rollbacks:
            return
        require_known(self._folder, state)
        self._noted = set()
        for step in kept(self._folder):
            if step > state.step:
                path = self._folder / f"step-{step}"
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    raise JournalError(
                        f"{path} cannot be removed ({error.strerror}), and is of a step that was undone: a run that "
                        "lost its journal could go on from it; make the folder writable, then --resume"
                    ) from error
        self._rollbacks = rollbacks

    def _write(self, snapshot: RecoverySnapshot) -> None:
        data = RECOVERY_SNAPSHOT.encode(snapshot)
        path = self._folder / f"step-{snapshot.step}"
        try:
            self._folder.mkdir(exist_ok=True)
            replace_file(path, hashlib.sha256(data).digest() + data)
        except OSError as error:
            raise JournalError(
                f"{path} cannot be written ({error.strerror}), without which the run could not go on from its "
                "checkpoint if its journal were lost; free some space or mend the disk, then --resume"
            ) from error


def kept(folder: Path) -> list[int]:
    """Steps of which there are snapshots, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)))


def require_known(folder: Path, state: State | None) -> None:
    """Check that a journal has what each snapshot is of, though it may have been undone since.

    The state is the fold of the journal; None if it is gone, or empty. What was lost is a DamagedJournalError.
    """
    for step in kept(folder):
        if state is None or not _is_known(folder, step, state):
            found = "it is gone, or empty" if state is None else f"it ends at step {state.step}"
            raise DamagedJournalError(
                f"the journal of {folder.parent} has lost entries: {found}, and has not what {folder}/step-{step} is "
                f"of; {RECOVER.format(folder.parent)}"
            )


def _is_known(folder: Path, step: int, state: State) -> bool:
    try:
        return is_known(read(folder, step), state)
    except JournalError:
        # It is of no use to anyone, and may be what was left where the run was taken back.
        return step <= state.step or state.undone > 0


def read(folder: Path, step: int) -> RecoverySnapshot:
    """The snapshot at a step."""
    path = folder / f"step-{step}"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error.strerror}") from error
    data = content[_DIGEST_BYTES:]
    if hashlib.sha256(data).digest() != content[:_DIGEST_BYTES]:
        raise JournalError(f"{path}: is damaged: its content does not have its digest")
    try:
        snapshot: RecoverySnapshot = RECOVERY_SNAPSHOT.decode(data)
    except TransportError as error:
        raise JournalError(f"{path}: was written by another release of cosmos-core ({error})") from error
    return snapshot
