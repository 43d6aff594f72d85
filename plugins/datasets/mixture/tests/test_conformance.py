"""Mixtures keep the protocol of datasets."""

import json

import pytest

from cosmos_core.testing import DatasetConformance

pytestmark = pytest.mark.nightly


def write(path, name, number):
    rows = [{"q": f"{name} {n}", "a": f"{n}"} for n in range(number)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class TestMixture(DatasetConformance):
    plugin = "mixture"

    @pytest.fixture
    def options(self, tmp_path):
        write(tmp_path / "sums.jsonl", "sum", 60)
        fields = {"prompt": "{q}", "demonstration": "{a}", "reference": "a", "heldout_rows": 10}
        parts = [
            {"plugin": "jsonl", "weight": 3, "options": {"train": "sums.jsonl", **fields}},
            {"plugin": "arithmetic", "options": {"train_rows": 20, "heldout_rows": 8}},
        ]
        return {"parts": parts}


class TestMixtureOfMixtures(DatasetConformance):
    plugin = "mixture"

    @pytest.fixture
    def options(self):
        inner = [
            {"plugin": "arithmetic", "name": name, "options": {"train_rows": 40, "max_operand": most}}
            for name, most in (("small", 9), ("large", 99))
        ]
        return {
            "parts": [{"plugin": "mixture", "options": {"parts": inner}}, {"plugin": "arithmetic", "weight": 0.5}],
            "epoch": "shortest",
        }
