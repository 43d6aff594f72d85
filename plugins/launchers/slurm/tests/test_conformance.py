from __future__ import annotations

import pytest

from cosmos_core.testing import LauncherConformance


class TestSlurm(LauncherConformance):
    plugin = "slurm"

    @pytest.fixture(autouse=True)
    def _no_job(self, monkeypatch):
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)


class TestSlurmWithOptions(TestSlurm):
    @pytest.fixture
    def options(self):
        return {"gpus_per_node": 4, "partition": "main", "setup": ["module load cuda"]}
