"""The loss of held-out demonstrations, measured by all members of the group together."""

from __future__ import annotations

import attrs

from cosmos_core.policy.batches.share import ShareReader
from cosmos_core.policy.processes.group import GradientGroup
from cosmos_core.policy.training.meter import Meter
from cosmos_core.policy.training.trainer import Trainer
from cosmos_core.transport.reports import HeldOutLoss


@attrs.frozen(kw_only=True, eq=False)
class HeldOut:
    """Measures the first rows of the held-out split.

    Attributes:
        trainer: This replica's weights.
        reader: Reads the rows.
        num_rows: How many.
    """

    trainer: Trainer
    reader: ShareReader
    num_rows: int

    def measure(self, group: GradientGroup) -> HeldOutLoss:
        """Their loss at the present weights; the same on every process of every member.

        Args:
            group: Those that share the rows; all of their processes call this.

        Raises:
            GradientGroupError: The group broke.
        """
        share = self.reader.heldout(self.num_rows, group)
        meter = Meter()
        meter.add("loss", self.trainer.measure(share))
        meter = Meter.merged(self.trainer.world.exchange(meter.encode()))
        # Every process of a replica counts its whole share.
        meter.add("units", share.counts.decisions)
        meter.add("rows", share.counts.sequences)
        sums = Meter.merged(group.exchange(meter.encode())).sums
        return HeldOutLoss(
            version=self.trainer.step,
            loss=sums["loss"] / max(sums["units"], 1),
            num_units=int(sums["units"]),
            num_rows=int(sums["rows"]),
            dropped=share.dropped,
            details=dict(share.details),
        )
