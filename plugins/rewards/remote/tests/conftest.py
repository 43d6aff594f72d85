import importlib.util
import threading
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("reward_standin", Path(__file__).with_name("standin.py"))
standin_module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(standin_module)


@pytest.fixture(scope="session")
def serving():
    with standin_module.Standin() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def standin(serving):
    serving.requests.clear()
    serving.failures.clear()
    serving.most_active = 0
    return serving


@pytest.fixture
def secret(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", standin_module.KEY)
    return standin_module.KEY
