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
        asked = {"choices": {"A": "It falls.", "B": "It stays."}, "label": "physics/mechanics", "reasoning": "Seen."}
        rows = [{"question": f"What of ball {n}?", "answer": "AB"[n % 2], **asked} for n in range(60)]
        return {**write(tmp_path, rows), "labels": "required", "demonstrations": "required"}


class TestFreeAnswers(DatasetConformance):
    plugin = "reason"

    @pytest.fixture
    def options(self, tmp_path):
        rows = [{"question": f"Ball {n}?", "answer": [str(n), f"ball {n}"]} for n in range(60)]
        return {**write(tmp_path, rows), "chat": False, "thought": False}


class TestChats(DatasetConformance):
    plugin = "reason"

    @pytest.fixture
    def options(self, tmp_path):
        turns = [[("user", f"Ball {n}?"), ("assistant", f"<answer>{n}</answer>")] for n in range(60)]
        return write(
            tmp_path,
            [{"conversations": [{"role": role, "content": said} for role, said in pair]} for pair in turns],
        )


class TestClips(DatasetConformance):
    plugin = "reason-mock"

    @pytest.fixture
    def options(self):
        return {"train_rows": 60, "heldout_rows": 10}
