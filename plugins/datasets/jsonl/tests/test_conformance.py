"""Files of every kind keep the protocol of datasets."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cosmos_core.testing import DatasetConformance

ROWS = [{"question": f"{n} and {n}?", "answer": f"{n}+{n}\n#### {2 * n}", "tags": {"terms": [n, n]}} for n in range(60)]
MAPPING = {"prompt": "{question}\n", "demonstration": "{answer}", "reference": "answer", "heldout_rows": 10}


class TestJsonl(DatasetConformance):
    plugin = "jsonl"

    @pytest.fixture
    def options(self, tmp_path):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        return {"train": "rows.jsonl", "reference_pattern": "#### (.+)", **MAPPING}


@pytest.mark.nightly
class TestParquet(DatasetConformance):
    plugin = "jsonl"

    @pytest.fixture
    def options(self, tmp_path):
        pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet", row_group_size=7)
        return {"train": "rows.parquet", **MAPPING, "reference": "tags"}


@pytest.mark.nightly
class TestPreferences(DatasetConformance):
    plugin = "jsonl"

    @pytest.fixture
    def options(self, tmp_path):
        rows = [{**row, "worse": f"I do not know what {row['question']} is"} for row in ROWS]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return {"train": "rows.jsonl", "rejected": "{worse}", "metadata": ["tags"], **MAPPING}


@pytest.mark.nightly
class TestRowsCheckedWhenRead(DatasetConformance):
    plugin = "jsonl"

    @pytest.fixture
    def options(self, tmp_path):
        pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet", row_group_size=7)
        return {"train": "rows.parquet", "check_rows": "when-read", **MAPPING}


@pytest.mark.nightly
class TestChats(DatasetConformance):
    plugin = "jsonl"

    @pytest.fixture
    def options(self, tmp_path):
        roles = {"question": "user", "answer": "assistant"}
        chats = [[{"role": role, "content": row[name]} for name, role in roles.items()] for row in ROWS]
        lines = [
            json.dumps({"turns": turns, "tags": row["tags"]}) + "\n" for turns, row in zip(chats, ROWS, strict=True)
        ]
        for name, part in (("train", lines[:50]), ("heldout", lines[50:])):
            (tmp_path / f"{name}.jsonl").write_text("".join(part))
        return {"train": "train.jsonl", "heldout": "heldout.jsonl", "messages": "turns", "reference": "tags"}
