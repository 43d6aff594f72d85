"""The library is an extra, and no test is without it; the environment of the tests is a module beside them."""

import importlib.util
import os
import warnings
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _toy():
    if importlib.util.find_spec("verifiers") is None:
        pytest.skip("needs cosmos-environment-verifiers[library]")
    here = str(Path(__file__).parent)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the library are not ours to mend
        patch.syspath_prepend(here)
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])))
        importlib.import_module("verifiers.v1")
        yield
