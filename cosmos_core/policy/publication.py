"""Publishes weight versions: the snapshot on the training thread, its digest and announcement on another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import torch

from cosmos_core.transport.messages import WeightsPublished
from cosmos_core.weights.publisher import WeightPublisher
from cosmos_core.weights.snapshot import Snapshot

DTYPES: Final[Mapping[str, torch.dtype]] = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Publications:
    """What this replica has published.

    Args:
        publisher: Holds and serves the snapshots.
        dtype: The rollout replicas' precision.
        report: Told of each version once it can be read, on the background thread.

    Attributes:
        newest: Newest version published or about to be; -1 before the first.
    """

    def __init__(
        self, publisher: WeightPublisher, dtype: torch.dtype, report: Callable[[WeightsPublished], None]
    ) -> None:
        self.newest = -1
        self._publisher = publisher
        self._dtype = dtype
        self._report = report
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publication")
        self._sealing: list[Future[None]] = []

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the weights; they may change as soon as this returns.

        Raises:
            WeightSyncError: There is no room for the copy, or an earlier publication failed.
        """
        self.check()
        snapshot = self._publisher.stage(version, tensors, self._dtype)
        self.newest = version
        self._sealing.append(self._thread.submit(self._seal, snapshot))

    def retain(self, oldest: int) -> None:
        """Drop versions before `oldest`."""
        self._publisher.retain(oldest)

    def check(self) -> None:
        """Raise what a publication in the background raised.

        Raises:
            CosmosError: It failed.
        """
        for done in [future for future in self._sealing if future.done()]:
            self._sealing.remove(done)
            done.result()

    def close(self) -> None:
        """Wait until everything published is announced."""
        self._thread.shutdown(wait=True)
        self.check()

    def _seal(self, snapshot: Snapshot) -> None:
        self._report(self._publisher.seal(snapshot))
