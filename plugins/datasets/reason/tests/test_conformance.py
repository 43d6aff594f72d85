"""Questions keep the protocol of datasets."""

import json

import pytest

from cosmos_core.testing import DatasetConformance

pytestmark = pytest.mark.nightly


def write(folder, rows):
    (folder / "film.mp4").write_bytes(b"film")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"video": "film.mp4", **row}) + "\n" for row in rows))
    return {"train": "rows.jsonl", "heldout_rows": 10}


class TestChoices(DatasetConformance):
    plugin = "reason"

    @pytest.fixture
    def options(self, tmp_path):
        choices = {"A": "It falls.", "B": "It stays."}
        rows = [
            {"question": f"What of ball {n}?", "choices": choices, "answer": "AB"[n % 2], "label": "physics/mechanics"}
            for n in range(60)
        ]
        return {**write(tmp_path, rows), "labels": "required"}


class TestFreeAnswers(DatasetConformance):
    plugin = "reason"

    @pytest.fixture
    def options(self, tmp_path):
        rows = [{"question": f"Ball {n}?", "answer": [str(n), f"ball {n}"]} for n in range(60)]
        return {**write(tmp_path, rows), "chat": False, "thought": False}
