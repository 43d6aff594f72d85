"""The objective that both ways of distilling share."""

from __future__ import annotations

from collections.abc import Sequence

from cosmos_core.protocols import PlainAlgorithm
from cosmos_core.types import Group


class Distillation(PlainAlgorithm):
    """An objective that looks at no rewards: every finished completion is trained on, each token alike."""

    def admit(self, group: Group) -> str | None:
        """A group with a finished completion."""
        return None if any(sample.is_scored for sample in group.samples) else "no completion finished"

    def advantages(self, groups: Sequence[Group]) -> list[list[float | None]]:
        """1 for a finished completion, None for one that failed."""
        return [[1.0 if sample.is_scored else None for sample in group.samples] for group in groups]
