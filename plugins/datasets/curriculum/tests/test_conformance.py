"""Curricula keep the protocol of datasets."""

import json

import pytest

from cosmos_core.testing import DatasetConformance

pytestmark = pytest.mark.nightly


class TestCurriculum(DatasetConformance):
    plugin = "curriculum"

    @pytest.fixture
    def options(self, tmp_path):
        rows = [{"q": f"{n} + {n}?", "a": str(2 * n), "level": n % 7} for n in range(60)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        fields = {"prompt": "{q}", "demonstration": "{a}", "reference": "a", "metadata": ["level"], "heldout_rows": 10}
        return {
            "difficulty": "level",
            "part": {"plugin": "jsonl", "options": {"train": "rows.jsonl", **fields}},
        }
