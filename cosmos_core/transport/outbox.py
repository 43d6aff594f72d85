"""Reports that the controller has not acknowledged yet: numbered without a gap, kept until they are durable there.

Pure bookkeeping, go-back-N: `peek` gives what has not been sent since the last `go_back`, in order.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Final

from cosmos_core.errors import TransportError


class Outbox:
    """The reports of one incarnation. Not thread-safe.

    At most `max_reports` of `max_bytes` together may wait for an acknowledgement, and `window` may be sent ahead of the
    newest one.

    Attributes:
        acknowledged: Newest number that the controller has made durable; 0 before the first.
        newest_sent: Newest number that was sent since the last `go_back`, or is acknowledged.
    """

    __slots__ = ("_max_bytes", "_max_reports", "_nbytes", "_reports", "_window", "acknowledged", "newest_sent")

    def __init__(self, *, max_reports: int = 200_000, max_bytes: int = 256 << 20, window: int = 4096) -> None:
        self._max_reports: Final = max_reports
        self._max_bytes: Final = max_bytes
        self._window: Final = window
        self._reports: Final[deque[bytes]] = deque()
        self._nbytes = 0
        self.acknowledged = 0
        # Invariant: acknowledged <= newest_sent <= acknowledged + len(reports), the last being the newest number.
        self.newest_sent = 0

    @property
    def last(self) -> int:
        """Newest number given."""
        return self.acknowledged + len(self._reports)

    def __len__(self) -> int:
        """The number of reports that wait for an acknowledgement."""
        return len(self._reports)

    @property
    def is_sendable(self) -> bool:
        """True if `peek` would give anything."""
        return self.newest_sent < min(self.last, self.acknowledged + self._window)

    def append(self, report: bytes) -> int:
        """Add an encoded report; its number, from 1. A TransportError if the outbox is full."""
        if len(self._reports) >= self._max_reports or self._nbytes + len(report) > self._max_bytes:
            raise TransportError(
                f"the outbox is full: {len(self._reports)} reports ({self._nbytes} bytes) since number "
                f"{self.acknowledged} are not acknowledged; is the controller alive and its disk writable?"
            )
        self._reports.append(report)
        self._nbytes += len(report)
        return self.last

    def peek(self, *, max_reports: int, max_bytes: int) -> tuple[int, tuple[bytes, ...]] | None:
        """The next reports to send, at least one, and the number of the first; None if there are none."""
        if not self.is_sendable:
            return None
        start = self.newest_sent - self.acknowledged
        batch: list[bytes] = []
        size = 0
        for report in islice(self._reports, start, min(self._window, start + max_reports)):
            size += len(report)
            if batch and size > max_bytes:
                break
            batch.append(report)
        return self.newest_sent + 1, tuple(batch)

    def sent(self, number: int) -> None:
        """Note that reports up to `number` were sent."""
        self.newest_sent = max(self.newest_sent, min(number, self.last))

    def go_back(self) -> None:
        """Let `peek` give everything unacknowledged again, from the oldest on."""
        self.newest_sent = self.acknowledged

    def acknowledge(self, number: int) -> bool:
        """Forget reports up to `number`; whether it was news, which an older number than the newest one is not.

        A TransportError if no report has that number yet; nothing is changed.
        """
        if number > self.last:
            raise TransportError(f"report {number} was acknowledged, but only {self.last} were made")
        if number <= self.acknowledged:
            return False
        while self.acknowledged < number:
            self._nbytes -= len(self._reports.popleft())
            self.acknowledged += 1
        self.newest_sent = max(self.newest_sent, number)
        return True
