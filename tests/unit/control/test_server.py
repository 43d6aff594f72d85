"""Who is asked for when keys are revoked: everybody, but only when the list of keys has changed."""

from __future__ import annotations

import attrs
import pytest

from cosmos_core.control import server
from cosmos_core.control.server import Inbox


@attrs.define
class Allowed:
    num_changes: int = 0


@attrs.define
class Authenticator:
    """Lets everybody in but `out`."""

    allowed: Allowed = attrs.field(factory=Allowed)
    out: str = ""

    def find(self, public):
        return None if public == self.out else public


@attrs.define
class Listener:
    authenticator: Authenticator = attrs.field(factory=Authenticator)
    num_refused: int = 0


class Known:
    """Identities that speak, and how often they were asked for."""

    def __init__(self, *identities):
        self.identities, self.num_asked = set(identities), 0

    def __call__(self):
        self.num_asked += 1
        return self.identities


@pytest.fixture
def listener():
    return Listener()


def test_nobody_is_asked_for_while_the_list_of_keys_stays_as_it_is(listener):
    known, inbox = Known(b"a", b"b"), Inbox(listener)
    inbox._keys.update({b"a": "A", b"b": "B"})
    assert [inbox.revoked(known) for _ in range(100)] == [[]] * 100
    assert known.num_asked == 0
    listener.authenticator.out, listener.authenticator.allowed.num_changes = "B", 1
    assert inbox.revoked(known) == [b"b"]
    assert inbox.revoked(known) == []


def test_those_who_spoke_once_are_forgotten_in_time(listener, monkeypatch):
    monkeypatch.setattr(server, "_SPARE_IDENTITIES", 5)
    known, inbox = Known(b"0", b"1"), Inbox(listener)
    for number in range(100):
        inbox._keys[b"%d" % number] = "A"
        inbox.revoked(known)
        assert len(inbox._keys) <= 10
    assert inbox._keys.keys() >= known.identities
    assert known.num_asked < 20
