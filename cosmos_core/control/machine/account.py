"""The account of a run at a step: what a new journal can go on from when the old one cannot be read any more."""

from __future__ import annotations

from typing import Final

import attrs

from cosmos_core.control.machine.ledger import Ledger, LedgerMark
from cosmos_core.control.machine.records import EvaluationRecord, SettingChange, StepRecord
from cosmos_core.control.machine.settings import Settings
from cosmos_core.control.machine.state import Checkpoints, State
from cosmos_core.transport.codec import Codec

_LEASES: Final = 1 << 40
_TERMS: Final = 1 << 20
"""More leases, and more terms and generations, than can have been used since an account was made."""


def since_recovery(number: int) -> int:
    """The number of a term or a generation as people count them: from the beginning of the run, or its recovery.

    Source: `restored`, which leaves a gap that only logs and messages need.
    """
    return number % _TERMS


@attrs.frozen(kw_only=True)
class Account:
    """What a run was at a step of which a checkpoint was wanted; nothing of what was in flight.

    Attributes:
        settings: Constants of the run.
        step: The step.
        term: Starts of the controller up to then.
        generation_number: Of the newest generation up to then.
        next_lease: The first lease that had not been used.
        marks: The prompts of each stage.
        steps: A record of each step up to it.
        evaluations: Of weights up to it.
        changes: Of dynamic keys that hold at the next step.
    """

    settings: Settings
    step: int
    term: int
    generation_number: int
    next_lease: int
    marks: tuple[LedgerMark, ...]
    steps: tuple[StepRecord, ...]
    evaluations: tuple[EvaluationRecord, ...]
    changes: tuple[SettingChange, ...] = ()


ACCOUNT: Final = Codec((Account,))


def account_of(state: State, step: int) -> Account:
    """The account at a step of which a checkpoint was wanted."""
    return Account(
        settings=state.settings,
        step=step,
        term=state.term,
        generation_number=state.generation_number,
        next_lease=state.next_lease,
        marks=state.marks[step],
        steps=tuple(state.steps[:step]),
        evaluations=tuple(done for done in state.evaluations if done.version <= step),
        changes=tuple(change for change in state.changes if change.step <= step + 1),
    )


def is_known(account: Account, state: State) -> bool:
    """Whether a state's history has what an account is of: it came to that, or was taken back from it.

    If not, the account was written after all that the history has, which has lost its end.
    """
    newest = state.undone if account.step > state.step else state.generation_number
    return account.generation_number <= newest


def restored(account: Account, checkpoint: str) -> State:
    """The state that an account and its checkpoint go on from; all that was said under the old journal is older."""
    return State(
        settings=account.settings,
        term=account.term + _TERMS,
        step=account.step,
        generation_number=account.generation_number + _TERMS,
        next_lease=account.next_lease + _LEASES,
        ledgers=[Ledger.restore(mark) for mark in account.marks],
        steps=list(account.steps),
        evaluations=list(account.evaluations),
        changes=list(account.changes),
        checkpoints=Checkpoints(saved={account.step: checkpoint}),
        marks={account.step: account.marks},
        undone=account.generation_number + _TERMS,
    )
