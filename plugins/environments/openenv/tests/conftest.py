import importlib.util
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("openenv_standin", Path(__file__).with_name("standin.py"))
standin_module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(standin_module)


@pytest.fixture(scope="session")
def serving():
    with standin_module.Standin() as server:
        yield server


@pytest.fixture
def server(serving):
    serving.forget()
    return serving
