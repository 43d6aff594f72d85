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


spec = importlib.util.spec_from_file_location("reward_queueing", Path(__file__).with_name("queueing.py"))
queueing_module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(queueing_module)


@pytest.fixture(scope="session")
def queueing_server():
    with queueing_module.Queueing() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def queueing(queueing_server, monkeypatch):
    """A server that queues, and what makes it the one that rewards ask."""
    queueing_server.reset()
    for prefix in ("WFM_REWARD", "REMOTE_REWARD"):
        for name in ("ENQUEUE_URL", "FETCH_URL", "TOKEN"):
            monkeypatch.delenv(f"{prefix}_{name}", raising=False)

    def at(kind, prefix="WFM_REWARD", fetch="fetch"):
        monkeypatch.setenv(f"{prefix}_ENQUEUE_URL", f"{queueing_server.url}/{kind}/enqueue")
        monkeypatch.setenv(f"{prefix}_FETCH_URL", f"{queueing_server.url}/{kind}/{fetch}")
        monkeypatch.setenv(f"{prefix}_TOKEN", queueing_module.TOKEN)
        return queueing_server

    return at
