"""The library is an extra, and no test is without it."""

import warnings

import pytest


@pytest.fixture(autouse=True)
def _library():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of its dependencies are not ours to mend
        pytest.importorskip("reasoning_gym", reason="needs cosmos-dataset-reasoning-gym[library]")
