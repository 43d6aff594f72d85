"""Key files and allow-lists: what is made, what is refused, and that nothing secret is shown."""

import os
import stat
import time

import pytest

from cosmos_core.errors import ConfigError
from cosmos_core.transport import key_folder
from cosmos_core.transport.authentication import refusal
from cosmos_core.transport.key_folder import USUAL, AllowList, Peer, Wanted, read_peers
from cosmos_core.transport.keys import (
    ALLOWED,
    controller_key,
    is_named,
    person_key,
    read_key,
    replica_key,
)
from cosmos_core.transport.messages import Beat, Command, Hello, Reports, Watch
from cosmos_service_tools import allow_list


@pytest.fixture
def folder(tmp_path):
    key_folder.make(tmp_path / "keys", USUAL)
    return tmp_path / "keys"


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_made_is_secret_and_allowed(folder):
    assert mode(folder) == 0o700
    assert {path.name: mode(path) for path in folder.iterdir()} == dict.fromkeys(
        ("controller.key", "policy.key", "rollout.key", "operator.key", ALLOWED), 0o600
    )
    server = controller_key(folder).pair.public
    for label, peer in read_peers(folder / ALLOWED).items():
        key = read_key(folder / f"{label}.key")
        assert (key.pair.public, key.role, key.names, key.server) == (peer.public, peer.role, peer.names, server)
        assert key.pair.secret not in (folder / ALLOWED).read_text()


def test_a_secret_is_never_shown(folder):
    key = read_key(folder / "rollout.key")
    assert key.pair.secret not in f"{key.pair} {key!r}"
    text = (folder / "rollout.key").read_text()
    for damaged in (text.replace('secret = "', 'secret = ["'), text + "more = 1\n", text.replace("rollout-*", "a b")):
        (folder / "rollout.key").write_text(damaged)
        with pytest.raises(ConfigError) as error:
            read_key(folder / "rollout.key")
        assert key.pair.secret not in str(error.value)
        assert key.pair.secret not in str(error.value.__cause__)


def test_a_key_that_others_may_open_is_refused(folder, subtests):
    for bits in [0o640, 0o604, 0o660, 0o602]:
        with subtests.test(bits=bits):
            (folder / "rollout.key").chmod(bits)
            with pytest.raises(ConfigError, match=rf"mode {bits:04o}.*chmod 600"):
                replica_key(folder, "rollout", "rollout-1")
    (folder / ALLOWED).chmod(0o620)
    with pytest.raises(ConfigError, match="other users may change"):
        AllowList(folder / ALLOWED)


def test_a_key_is_never_replaced(folder):
    before = (folder / "rollout.key").read_bytes()
    with pytest.raises(ConfigError, match=r"rollout\.key exists, .* choose other names, with --policy"):
        key_folder.make(folder, [Wanted(role="person", name="ann"), Wanted(role="rollout", name="rollout-*")])
    with pytest.raises(ConfigError, match="two such keys"):
        key_folder.make(folder, [Wanted(role="person", name="ann"), Wanted(role="person", name="ann")])
    assert (folder / "rollout.key").read_bytes() == before
    assert not (folder / "ann.key").exists()
    assert "ann" not in read_peers(folder / ALLOWED)


def test_names_that_cannot_be_are_refused(folder, subtests):
    for name in ["", "a b", "a/b", "../x", "-x", "a*b", "x\n", "ü", "x" * 200]:
        with subtests.test(name=name), pytest.raises(ConfigError, match="no name of"):
            key_folder.make(folder, [Wanted(role="rollout", name=name)])


def test_the_key_for_one_name_comes_before_that_of_the_pool(folder):
    assert replica_key(folder, "rollout", "rollout-7").label == "rollout"
    key_folder.make(folder, [Wanted(role="rollout", name="rollout-7")])
    assert replica_key(folder, "rollout", "rollout-7").label == "rollout-7"
    assert replica_key(folder, "rollout", "rollout-8").label == "rollout"
    for role, name in (("policy", "rollout-7"), ("rollout", "other")):
        with pytest.raises(ConfigError, match=f"--{role} {name}"):
            replica_key(folder, role, name)


def test_whoever_asks_needs_a_persons_key(folder):
    (folder / "operator.key").unlink()
    with pytest.raises(ConfigError, match="no key of a person"):
        person_key(folder)
    key_folder.make(folder, [Wanted(role="observer", name="wall")])
    assert person_key(folder).label == "wall"
    with pytest.raises(ConfigError, match="observer's key"):
        person_key(folder, may_ask=True)


def test_a_run_makes_its_keys_once_and_whole(tmp_path):
    key_folder.ensure(tmp_path / "keys")
    before = controller_key(tmp_path / "keys")
    key_folder.ensure(tmp_path / "keys")
    assert controller_key(tmp_path / "keys") == before
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]
    (tmp_path / "keys" / "controller.key").unlink()
    with pytest.raises(ConfigError, match=r"without controller\.key"):
        key_folder.ensure(tmp_path / "keys")


def test_a_list_follows_its_file_and_survives_a_damaged_one(folder, caplog, monkeypatch):
    monkeypatch.setattr("cosmos_core.transport.key_folder._LOOK_S", 0.0)
    allowed = AllowList(folder / ALLOWED)
    public = read_key(folder / "rollout.key").pair.public
    assert allowed.find(public).label == "rollout"
    allow_list.revoke(folder, "rollout")
    assert allowed.find(public) is None
    assert allowed.num_changes == 1
    whole = (folder / ALLOWED).read_text()
    (folder / ALLOWED).write_text("[")
    os.utime(folder / ALLOWED, (1, 1))
    assert allowed.find(read_key(folder / "policy.key").pair.public).label == "policy"
    assert "stays as it was" in caplog.text
    (folder / ALLOWED).write_text(whole)
    allow_list.allow_again(folder, "rollout")
    assert allowed.find(public).label == "rollout"


def test_a_list_is_not_looked_at_for_every_message(folder, monkeypatch):
    allowed = AllowList(folder / ALLOWED)
    looks = []
    monkeypatch.setattr(AllowList, "_stamp", lambda self: looks.append(time.monotonic()))
    for _ in range(1000):
        allowed.find("x")
    assert len(looks) <= 1


def test_what_a_list_may_say(folder):
    good = read_key(folder / "rollout.key").pair.public
    with pytest.raises(ConfigError, match="no public key"):
        allow_list.allow(folder, "bob", public=good[:-1], role="person")
    with pytest.raises(ConfigError, match="needs the names"):
        allow_list.allow(folder, "bob", public=good, role="rollout")
    with pytest.raises(ConfigError, match="is another key"):
        allow_list.allow(folder, "operator", public=good, role="person")
    with pytest.raises(ConfigError, match=r"not in it \(there are: operator, policy, rollout\)"):
        allow_list.revoke(folder, "bob")
    with pytest.raises(ConfigError, match="is no role"):
        allow_list.role_of("root")
    for text in ("bob = 1", '[bob]\npublic = "x"\nrole = "person"', '["a b"]\npublic = ""\nrole = "person"'):
        (folder / ALLOWED).write_text(text)
        with pytest.raises(ConfigError, match=ALLOWED):
            read_peers(folder / ALLOWED)


def test_a_name_is_one_or_begins_like_one():
    assert is_named("rollout-1", ("policy-*", "rollout-*"))
    assert is_named("a", ("a",))
    assert not is_named("ab", ("a",))
    assert not is_named("rollout", ("rollout-*",))
    assert is_named("x", ("*",))
    assert not is_named("x", ())


def peer(role, *names):
    return Peer(label="k", role=role, names=names, public="")


HELLO = Hello(
    wire=1, run_id="r", name="rollout-1", role="rollout", incarnation="i", host="h", pid=1, step=0, endpoints={}
)
BEAT = Beat(name="rollout-1", incarnation="i", term=1, revision=0, gauges={})
REPORTS = Reports(name="rollout-1", incarnation="i", term=1, first=1, reports=())
WATCH = Watch(run_id="r", after=0)
COMMAND = Command(run_id="r", ident="c", request=b"")


def test_who_may_say_what(subtests):
    for who, may in [
        (peer("rollout", "rollout-*"), (HELLO, BEAT, REPORTS)),
        (peer("rollout", "rollout-2"), ()),
        (peer("policy", "*"), (BEAT, REPORTS)),
        (peer("person"), (WATCH, COMMAND)),
        (peer("observer"), (WATCH,)),
    ]:
        with subtests.test(who=who, may=may):
            for message in (HELLO, BEAT, REPORTS, WATCH, COMMAND):
                reason = refusal(who, message)
                assert not reason if message in may else "key k" in reason
