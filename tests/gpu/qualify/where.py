"""Where a check runs, and whom it tells of its figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from tests.gpu.qualify.report import Figure, judged


@attrs.frozen(kw_only=True)
class Where:
    """What a check runs on.

    Attributes:
        device: `cuda` or `cpu`.
        is_tiny: Whether shapes are tiny, and only what is right is judged, not what is fast.
        folder: For files of this stage alone.
        tell: Takes a figure as soon as it is known.
    """

    device: str
    is_tiny: bool
    folder: Path
    tell: Callable[[Figure], None]

    def shape(self, name: str) -> str:
        """A shape of `benchmarks/step.py`, or in the dry form the tiny one that stands for it."""
        return name if not self.is_tiny else "tiny" if name == "0.6B" else "tiny untied"

    def right(self, name: str, value: float, unit: str = "", **bounds: Any) -> None:
        """Tell a figure that is judged anywhere; `bounds` are of `report.judged`."""
        self.tell(judged(name, value, unit, **bounds))

    def speed(self, name: str, value: float, unit: str = "", **bounds: Any) -> None:
        """Tell a figure that is judged at real shapes on a GPU only."""
        self.tell(judged(name, value, unit, is_judged=not self.is_tiny, **bounds))

    def skipped(self, name: str, reason: str) -> None:
        """Tell why there is no figure."""
        self.tell(Figure(name=name, verdict="skipped", note=reason))

    def failed(self, name: str, reason: str) -> None:
        """Tell why there should be one."""
        self.tell(Figure(name=name, verdict="failed", note=reason))
