"""The kit for datasets."""

from __future__ import annotations

from cosmos_core.testing.conformance.dataset.contents import DatasetContents
from cosmos_core.testing.conformance.dataset.order import DatasetOrder


class DatasetConformance(DatasetContents, DatasetOrder):
    """What every dataset must satisfy: numbered rows, the same ones whenever, wherever and in whatever order.

    Set `plugin`, and what else the defaults do not do for.

    Attributes:
        num_rows: How many rows of each split the tests read, from both ends and between.
        repeats_rows: Whether most train rows may come again under another number, as when a few prompts are drawn from.
        holds_out_train_rows: Whether held-out rows may be train rows, as when a run shall learn a few rows by heart.

    Fixtures to override: `options`, the options to test with; `context`, whose `directory` is where relative paths
    start, the empty `tmp_path` by default. Write files there in `options` if the dataset reads some.
    """
