"""The pictures keep the protocol of datasets."""

import pytest

from cosmos_core.testing import DatasetConformance

pytestmark = pytest.mark.nightly


class TestShapes(DatasetConformance):
    plugin = "shapes"


class TestChats(DatasetConformance):
    plugin = "shapes"

    @pytest.fixture
    def options(self):
        return {"chat": True, "heldout_rows": 0, "image_size": 64}
