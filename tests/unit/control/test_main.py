"""How the controller's process starts."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

from cosmos_core.control import __main__


def test_it_listens_only_once_it_can_hear(tmp_path, monkeypatch):
    done = []
    listener = SimpleNamespace(socket=None, close=lambda linger_ms: done.append("closed"))
    state = SimpleNamespace(term=1, outcome="finished", reason="")
    server = SimpleNamespace(run=lambda stop: done.append("hears") is None)

    def doing(what, result):
        return lambda *_, **__: done.append(what) or result

    @contextlib.contextmanager
    def opened(job):
        yield SimpleNamespace(window=None, announcement={})

    control = SimpleNamespace(port=0, durable=False)
    recipe = SimpleNamespace(control=control, policy=SimpleNamespace(checkpoint=SimpleNamespace(keep=1)))
    job = SimpleNamespace(recipe=recipe, journal=tmp_path / "journal.sqlite", recovery_snapshots=tmp_path / "recovery")
    monkeypatch.setattr(__main__, "opened", opened)
    monkeypatch.setattr(__main__, "restore", doing("folded", (state, None)))
    monkeypatch.setattr(__main__, "_listen", doing("listens", listener))
    monkeypatch.setattr(__main__.sockets, "address_of", lambda socket: "tcp://127.0.0.1:1")
    monkeypatch.setattr(__main__, "_announce", doing("told", None))
    for name in ("RecoverySnapshots", "facts_of", "plugin_versions"):
        monkeypatch.setattr(__main__, name, lambda *_, **__: {})
    monkeypatch.setattr(__main__, "Server", lambda *_, **__: server)
    assert __main__._serve(job, None, None, threading.Event()) == 0
    assert done == ["folded", "listens", "told", "hears", "closed"]
