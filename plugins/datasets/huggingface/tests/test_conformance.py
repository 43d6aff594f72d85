"""Splits of every kind keep the protocol of datasets."""

import datasets
import pytest

from cosmos_core.testing import DatasetConformance

pytestmark = pytest.mark.nightly

ROWS = [{"question": f"{n} and {n}?", "answer": f"{2 * n}", "worse": "none", "level": n} for n in range(60)]
MAPPING = {"prompt": "{question}", "demonstration": "{answer}", "reference": "answer", "metadata": ["level"]}


class TestSavedToDisk(DatasetConformance):
    plugin = "huggingface"

    @pytest.fixture
    def options(self, tmp_path):
        table = datasets.Dataset.from_list(ROWS).train_test_split(test_size=10, shuffle=False)
        table.save_to_disk(str(tmp_path / "saved"))
        return {"path": "saved", "heldout_split": "test", "rejected": "{worse}", **MAPPING}


class TestBuilder(DatasetConformance):
    plugin = "huggingface"

    @pytest.fixture(autouse=True)
    def cache(self, tmp_path, monkeypatch):
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    @pytest.fixture
    def options(self, tmp_path):
        datasets.Dataset.from_list(ROWS).to_parquet(str(tmp_path / "rows.parquet"))
        return {"path": "parquet", "data_files": {"train": ["rows.parquet"]}, "heldout_rows": 10, **MAPPING}
