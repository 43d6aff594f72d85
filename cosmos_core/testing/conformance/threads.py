"""One torch thread for the kits that compute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cosmos_core.testing.conformance.plugin import PluginConformance


class OneThread(PluginConformance):
    """Sums in one order, the same on every machine of a kind; and tiny tensors are slower on many threads."""

    @pytest.fixture(autouse=True)
    def _one_thread(self) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)
