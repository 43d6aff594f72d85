"""How processes find each other, up to the process group; whole replicas are in the integration tests."""

from __future__ import annotations

import threading

import attrs
import pytest
import torch

from cosmos_core.config.schema import ControlConfig, MeshConfig
from cosmos_core.errors import ReplicaError
from cosmos_core.policy.processes.backend import GLOO, NCCL
from cosmos_core.policy.processes.bootstrap import Rendezvous, announce, bond, find, form_world, rendezvous_file
from cosmos_core.replica.health_channel import HealthChannel


@attrs.frozen(kw_only=True)
class Policy:
    mesh: MeshConfig


@attrs.frozen(kw_only=True)
class Recipe:
    policy: Policy
    control: ControlConfig = ControlConfig(join_timeout_s=0.2)


@attrs.frozen(kw_only=True)
class Args:
    """What `bond` looks at of a role's arguments."""

    job: object
    run_dir: object
    rank: int = 0
    session: str = "s"
    stop: threading.Event = attrs.field(factory=threading.Event)
    end: object = print
    address: str = "127.0.0.1"

    @property
    def name(self):
        return f"policy-0.{self.rank}" if self.rank else "policy-0"

    replica = "policy-0"


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    """What a bond says to process groups ends with the test."""
    for name in (GLOO, NCCL):
        monkeypatch.setenv(name, "lo")


@pytest.fixture
def args(tmp_path):
    def args(size=2, **more):
        job = attrs.make_class("FakeJob", ["recipe"])(Recipe(policy=Policy(mesh=MeshConfig(tp=size))))
        return Args(job=job, run_dir=tmp_path, **more)

    return args


def test_one_process_connects_to_no_other(args, tmp_path):
    bound = bond(args(1, session=""))
    assert type(bound.line) is HealthChannel
    assert (bound.size, bound.rank, bound.address) == (1, 0, "127.0.0.1")
    assert not (tmp_path / "replicas").exists()


def test_processes_that_were_not_started_together_are_refused(args):
    for rank, session in [(0, ""), (2, "s"), (-1, "s")]:
        with pytest.raises(ReplicaError, match="makes a replica 2 processes; each needs --rank 0 to 1 and the same"):
            bond(args(rank=rank, session=session))


def test_a_follower_says_that_its_leader_is_missing(args):
    with pytest.raises(ReplicaError, match=r"policy-0\.json: the leader has not written it within 0\.2 s"):
        bond(args(rank=1))


def test_a_follower_says_that_its_leader_is_gone(args, tmp_path):
    announce(
        rendezvous_file(tmp_path, "policy-0"),
        Rendezvous(session="s", token="t", host="127.0.0.1", health_port=1, store=1),
    )
    with pytest.raises(ReplicaError, match=r"its leader at 127\.0\.0\.1:1 cannot be reached"):
        bond(args(rank=1))


def test_a_leader_says_who_is_missing(args):
    alone = bond(args())
    with pytest.raises(ReplicaError, match=r"policy-0: ranks \[1\] of 2 did not appear within 0\.2 s; see logs/"):
        form_world(args(), alone, torch.device("cpu"))
    alone.line.goodbye()


def test_leader_and_follower_find_each_other(args, tmp_path):
    leader = bond(args())
    # The health channel's secret is in no command line.
    told = find(rendezvous_file(tmp_path, "policy-0"), "s", 5.0, lambda: False)
    assert leader.line._token == told.token
    assert told.token not in ("", "s")
    follower = bond(args(rank=1))
    leader.line.meet(5.0, lambda: False)
    leader.shared.set("key", "value")
    assert follower.shared.get("key") == b"value"
    assert (follower.rank, follower.address, follower.store) == (1, "127.0.0.1", None)
    farewell = threading.Thread(target=follower.line.goodbye)
    farewell.start()
    leader.line.goodbye()
    farewell.join()
