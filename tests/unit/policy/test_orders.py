"""Leader and follower act on the same directives, and the leader decides when waiting is pointless."""

from __future__ import annotations

import queue
import threading

import attrs
import pytest

from cosmos_core.policy.orders import STOP, LeaderOrders, Orders
from cosmos_core.replica.health_channel import HealthChannel
from cosmos_core.transport.directives import GenerationOrder, GroupRef, PolicyDirective, TrainOrder
from cosmos_core.transport.messages import Directive
from cosmos_core.types import Sample, SampleStatus


class Pair:
    """A world of two, one after the other."""

    size = 2

    def __init__(self):
        self.said = queue.Queue()

    def share(self, data):
        self.said.put(data)
        return data


class Follower(Pair):
    def __init__(self, leader):
        self.said = leader.said

    def share(self, data):
        assert data == b""
        return self.said.get_nowait()


class Controller:
    def __init__(self):
        self.waiting = []
        self.reports = []
        self.step = 0

    def wait_directive(self, after, timeout_s):
        return self.waiting.pop(0) if self.waiting else None

    def report(self, report):
        self.reports.append(report)

    def set_step(self, step):
        self.step = step


class Line(HealthChannel):
    def abandon(self, generation):
        self.abandoned = generation


SAMPLE = Sample(
    index=0,
    status=SampleStatus.OK,
    reward=0.1,
    rewards={"right": 0.1},
    oldest_version=0,
    newest_version=1,
    num_units=3,
    num_prompt_units=4,
)


def directive(revision, generation=1, *, stop=False):
    return Directive(
        term=1,
        revision=revision,
        acknowledged=0,
        policy=PolicyDirective(
            generation=GenerationOrder(
                generation=generation, members=("policy-0", "policy-1"), store="tcp://a:1", source=0, transfer=True
            ),
            train=TrainOrder(
                step=1,
                attempt=2,
                stage=0,
                groups=(GroupRef(position=0, row=5, lease=6, endpoint="tcp://b:2", samples=(SAMPLE,)),),
                shares=((0,), ()),
                publish=True,
            ),
            publish=3,
            retain=1,
            checkpoint=4,
            stop=stop,
        ),
    )


@pytest.fixture
def pair():
    controller, world, line, stop = Controller(), Pair(), Line(), threading.Event()
    leader = LeaderOrders(controller, world, line, stop)
    return controller, line, stop, leader, Orders(Follower(world), line)


def test_a_follower_makes_the_moves_of_its_leader(pair):
    controller, _, stop, leader, follower = pair
    assert leader.next(0.0) is None
    assert follower.next(0.0) is None
    controller.waiting.append(directive(1))
    assert leader.next(0.0) == directive(1).policy
    assert follower.next(0.0) == directive(1).policy
    assert leader.next(0.0) is None
    assert follower.next(0.0) is None
    stop.set()
    assert leader.next(0.0) == follower.next(0.0) == STOP


def test_the_leader_decides_that_waiting_is_pointless(pair):
    controller, line, _, leader, follower = pair
    controller.waiting.append(directive(1))
    leader.next(0.0)
    assert not leader.is_pointless(1)
    assert not follower.is_pointless(1)
    controller.waiting.append(directive(2, generation=2))
    assert not follower.is_pointless(1)
    assert leader.is_pointless(1)
    assert line.abandoned == 1
    assert follower.is_pointless(1)
    assert not follower.is_pointless(2)
    # What was seen while waiting is what comes next.
    assert leader.next(0.0) == directive(2, generation=2).policy


@pytest.mark.parametrize("is_event", [True, False])
def test_a_stop_makes_waiting_pointless(pair, is_event):
    controller, _, stop, leader, follower = pair
    if is_event:
        stop.set()
    else:
        controller.waiting.append(directive(1, stop=True))
    assert leader.is_pointless(1)
    assert follower.is_pointless(1)


def test_only_the_leader_reports(pair):
    controller, _, _, leader, follower = pair
    leader.report("mine")
    follower.report("theirs")
    leader.set_step(4)
    follower.set_step(5)
    assert (controller.reports, controller.step) == (["mine"], 4)


def test_a_directive_without_a_part_for_policies_changes_nothing(pair):
    controller, _, _, leader, _ = pair
    controller.waiting.append(attrs.evolve(directive(1), policy=None))
    assert leader.next(0.0) is None


def test_a_generation_that_is_given_up_or_left_is_not_waited_for(pair):
    controller, _, _, leader, _ = pair
    controller.waiting.append(directive(1))
    assert leader.next(0.0) is not None
    assert not leader.is_pointless(1)
    given_up = attrs.evolve(directive(2), policy=attrs.evolve(directive(2).policy, generation=None, train=None))
    controller.waiting.append(given_up)
    assert leader.is_pointless(1)
    assert leader.next(0.0) == given_up.policy
    controller.waiting.append(attrs.evolve(given_up, revision=3, policy=attrs.evolve(given_up.policy, leave=True)))
    assert leader.is_pointless(9)
