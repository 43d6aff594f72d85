from __future__ import annotations

import pytest

from cosmos_core.policy.processes.rendezvous import GroupStore


@pytest.fixture
def store():
    return GroupStore("127.0.0.1")
