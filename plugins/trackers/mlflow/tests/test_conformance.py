from __future__ import annotations

import pytest

from cosmos_core.testing import HookConformance


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # those of mlflow and its many dependencies are not ours to mend
class TestMlflow(HookConformance):
    plugin = "mlflow"
    timeout_s = 60.0  # the first call imports mlflow and makes a database
    own_variables = ("MLFLOW_",)

    @pytest.fixture(autouse=True)
    def _needs_mlflow(self):
        pytest.importorskip("mlflow", reason="the mlflow tracker needs mlflow")
