from __future__ import annotations

import pytest

from cosmos_core.testing import LauncherConformance


class TestKubernetes(LauncherConformance):
    plugin = "kubernetes"

    @pytest.fixture
    def options(self, tmp_path):
        variables = {"HOME": "/runs", "TOKEN": {"secret": "reward", "key": "token"}}
        return {"image": "registry/cosmos:1", "pvc": "shared", "mount": str(tmp_path), "env": variables}
