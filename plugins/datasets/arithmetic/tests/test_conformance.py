"""The word problems keep the protocol of datasets."""

import pytest

from cosmos_core.testing import DatasetConformance


class TestArithmetic(DatasetConformance):
    plugin = "arithmetic"


class TestWithoutHeldoutRows(DatasetConformance):
    plugin = "arithmetic"

    @pytest.fixture
    def options(self):
        return {"train_rows": 3, "heldout_rows": 0}
