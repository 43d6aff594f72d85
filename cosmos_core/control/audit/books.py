"""The audit's books of one stage: where its prompts are, as far as they ended after the journal began."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

import attrs

from cosmos_core.control.audit.found import Batch, StageAudit
from cosmos_core.control.machine.ledger import Ledger


@attrs.frozen(kw_only=True)
class _Fate:
    """The end of one prompt: the step that consumed it, or the reason it was dropped for; exactly one of them."""

    step: int | None = None
    reason: str = ""
    sequence: int


class Books:
    """Follows the prompts of a stage, one by one.

    Args:
        stage: Its index.
        ledger: The stage's, as the journal begins.
    """

    def __init__(self, stage: int, ledger: Ledger) -> None:
        self._stage: Final = stage
        self._fates: dict[int, _Fate] = {}
        self._live = set(_live(ledger))
        self._given_out = ledger.next_position
        self._before: Final = ledger.consumed + ledger.num_dropped
        self._consumed_before: Final = ledger.consumed
        self._drops_before: Final = dict(ledger.dropped)
        self._drops = Counter(self._drops_before)

    def move(self, ledger: Ledger, batch: Batch | None, sequence: int) -> Iterator[str]:
        """Book the prompts that were given out or came to their end.

        Args:
            ledger: The stage's, as it is now.
            batch: Of a step of the stage that has just been done.
            sequence: The journal's entry.

        Yields:
            What cannot be.
        """
        if ledger.next_position > self._given_out:
            self._live.update(range(self._given_out, ledger.next_position))
            self._given_out = ledger.next_position
        if ledger.consumed + ledger.num_dropped == self._before + len(self._fates):
            return
        now = set(_live(ledger))
        trained = {group.position for group in batch.groups} - batch.dropped.keys() if batch is not None else set()
        for position in sorted(self._live - now):
            if position in self._fates:
                yield f"stage {self._stage}, prompt {position}: came to an end twice"
            if position in trained and batch is not None:
                self._fates[position] = _Fate(step=batch.step, sequence=sequence)
                continue
            said = batch.dropped.get(position, "") if batch is not None else ""
            # Beyond the first ones, reasons are counted together (`records.count_dropped`).
            reason = said if said in ledger.dropped else self._risen(ledger)
            self._fates[position] = _Fate(reason=reason, sequence=sequence)
            self._drops[reason] += 1
            if not reason:
                yield f"stage {self._stage}, prompt {position}: was dropped without a reason"
        for position in sorted(now & self._fates.keys()):
            yield f"stage {self._stage}, prompt {position}: came back from its end"
        self._live = now

    def rewind(self, ledger: Ledger, closed_at: int) -> None:
        """Forget what came after an entry: the run went on from there, with this ledger."""
        self._fates = {at: fate for at, fate in self._fates.items() if fate.sequence <= closed_at}
        self._drops = Counter(self._drops_before)
        self._drops.update(fate.reason for fate in self._fates.values() if fate.step is None)
        self._live = set(_live(ledger))
        self._given_out = ledger.next_position

    def differences(self, ledger: Ledger) -> Iterator[str]:
        """In what these books and the run's own counts differ."""
        name, ended, live = f"stage {self._stage}", self._fates.keys(), set(_live(ledger))
        if both := sorted(ended & live):
            yield f"{name}: prompts {both} have ended and are live"
        accounted = self._before + len(ended) + len(live)
        if accounted != ledger.next_position:
            yield f"{name}: {ledger.next_position} prompts were given out, {accounted} are accounted for"
        if self._consumed() != ledger.consumed:
            yield f"{name}: the run counts {ledger.consumed} consumed prompts, on record are {self._consumed()}"
        if dict(self._drops) != {reason: number for reason, number in ledger.dropped.items() if number}:
            yield f"{name}: the run counts the drops {ledger.dropped}, on record are {dict(self._drops)}"

    def found(self) -> StageAudit:
        """What became of the stage's prompts."""
        return StageAudit(
            given_out=self._given_out,
            consumed=self._consumed(),
            dropped=dict(self._drops),
            live=len(self._live),
            before=self._before,
        )

    def _risen(self, ledger: Ledger) -> str:
        """A reason for which the run counts more drops than are booked, the newest; empty if there is none."""
        reasons = reversed(ledger.dropped.items())
        return next((reason for reason, number in reasons if reason and number > self._drops[reason]), "")

    def _consumed(self) -> int:
        return self._consumed_before + sum(fate.step is not None for fate in self._fates.values())


def _live(ledger: Ledger) -> tuple[int, ...]:
    return (*ledger.queued, *ledger.in_flight, *ledger.finished, *ledger.claimed)
