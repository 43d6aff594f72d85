"""Two replicas of two processes each (threads here): a collective succeeds on every process of a replica or on none."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch

from cosmos_core.policy.processes.group import GradientGroupError, solo
from cosmos_core.policy.processes.rendezvous import GroupStore, form_group
from cosmos_core.policy.replica import transfer_state
from cosmos_core.policy.training.metrics import Counters

CPU = torch.device("cpu")


class Shared:
    """What the processes of one replica have in common."""

    def __init__(self, size):
        self.meet = threading.Barrier(size, timeout=20.0)
        self.flags = [True] * size
        self.data = [b""] * size


class ThreadWorld:
    """Stands for `World` on a thread."""

    def __init__(self, rank, shared):
        self.rank, self.size, self.is_leader, self.shared = rank, len(shared.flags), rank == 0, shared

    def agree(self, is_good, waiting):
        self.shared.flags[self.rank] = is_good
        waiting()
        self.shared.meet.wait()
        verdict = all(self.shared.flags)
        self.shared.meet.wait()
        return verdict

    def share(self, data):
        self.shared.data[self.rank] = data
        self.shared.meet.wait()
        found = self.shared.data[0]
        self.shared.meet.wait()
        return found


def replicas(work, *, interrupted=lambda replica: False, absent=(), failed=lambda: None):
    """Run `work(replica, rank, group)` on each process of both; what it returns or raises, by (replica, rank)."""
    store = GroupStore("127.0.0.1")
    shared = [Shared(2), Shared(2)]

    def process(place):
        replica, rank = place
        try:
            group = form_group(
                generation=1,
                rank=replica,
                size=2,
                store="tcp://127.0.0.1:1" if place in absent else store.endpoint,
                address="127.0.0.1",
                device=CPU,
                interrupted=lambda: interrupted(replica),
                timeout_s=1.0 if place in absent else 20.0,
                world=ThreadWorld(rank, shared[replica]),
            )
            return work(replica, rank, group)
        except GradientGroupError as error:
            failed()
            return str(error)

    places = [(replica, rank) for replica in range(2) for rank in range(2)]
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(places, pool.map(process, places), strict=True))


def test_equal_ranks_reduce_with_each_other():
    def work(replica, rank, group):
        # As many elements and tensors as the rank's part of the model has.
        tensor = torch.full((3 + rank,), 10.0 * rank + replica)
        group.sum(tensor)
        copied = [torch.full((2,), float(replica)) for _ in range(1 + rank)]
        group.copy(copied, 1)
        return tensor.tolist(), [each.tolist() for each in copied]

    for (_, rank), (summed, copied) in replicas(work).items():
        assert summed == [20.0 * rank + 1.0] * (3 + rank)
        assert copied == [[1.0, 1.0]] * (1 + rank)


def test_leaders_exchange_for_all():
    def work(replica, rank, group):
        return group.exchange(f"{replica}/{rank}".encode()), group.exchange(bytes([replica]) * 5000)

    for small, large in replicas(work).values():
        assert small == [b"0/0", b"1/0"]
        assert large == [bytes([replica]) * 5000 for replica in range(2)]


def test_a_rank_whose_own_group_is_fine_learns_that_another_broke():
    has_failed = threading.Event()

    def work(replica, rank, group):
        if (replica, rank) == (0, 1):

            def broken(start):
                raise GradientGroupError("the cable was cut")

            group._run = broken
        try:
            group.sum(torch.ones(4))
        except GradientGroupError:
            if replica == 0:
                has_failed.set()
            raise
        return "applied"

    outcomes = replicas(work, interrupted=lambda replica: replica == 1 and has_failed.is_set())
    assert outcomes[0, 1] == "the cable was cut"
    assert outcomes[0, 0] == "generation 1: a collective failed in another process of this replica"
    # The other replica is told by a newer generation; it applies nothing either, although its leader's sum is complete.
    assert outcomes[1, 1] == "generation 1: interrupted in a collective"
    assert outcomes[1, 0] == "generation 1: a collective failed in another process of this replica"


def test_a_group_is_formed_by_every_process_or_by_none():
    has_failed = threading.Event()
    outcomes = replicas(
        lambda *_: "formed",
        absent={(0, 1)},
        interrupted=lambda replica: replica == 1 and has_failed.is_set(),
        failed=has_failed.set,
    )
    assert "cannot join at tcp://127.0.0.1:1" in outcomes[0, 1]
    assert "another process of this replica could not join" in outcomes[0, 0]
    assert "interrupted while members were awaited" in outcomes[1, 1]
    assert "another process of this replica could not join" in outcomes[1, 0]


class FakeTrainer:
    """This process's part of a state: as many tensors as its rank has."""

    def __init__(self, replica, rank):
        self.step, self.stage = 5 * replica, SimpleNamespace(index=replica)
        self.nonfinite_steps, self.unimitated_steps = replica, 2 * replica
        self.tensors = {f"{rank}.{index}": torch.full((2,), 10.0 * rank + replica) for index in range(1 + rank)}

    def state(self):
        return self.tensors


def test_each_process_takes_the_state_of_its_rank():
    def work(replica, rank, group):
        trainer = FakeTrainer(replica, rank)
        begun = []
        transfer_state(trainer, group, 1, begun.append)
        counts = trainer.step, trainer.nonfinite_steps, trainer.unimitated_steps
        return counts, begun, [each.tolist() for each in trainer.tensors.values()]

    for (replica, rank), (counts, begun, tensors) in replicas(work).items():
        assert (counts, begun) == ((5, 1, 2), [] if replica else [1])
        assert tensors == [[10.0 * rank + 1.0] * 2] * (1 + rank)


def test_the_only_member_shares_what_its_leader_says():
    shared = Shared(2)
    groups = [solo(1, ThreadWorld(rank, shared)) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda rank: groups[rank].exchange(b"from %d" % rank), range(2)))
    assert answers == [[b"from 0"]] * 2


class Counting:
    """A model whose first stage counts nothing (see `cosmos_core.protocols.model.MoEModel`)."""

    def __init__(self, rank):
        self.counts = [torch.tensor([1.0, 2.0])] if rank else []

    def counters(self, module):
        return self.counts

    def after_step(self, module):
        return {}

    def records(self):
        return ()

    def record(self, module):
        raise AssertionError


def test_a_stage_that_counts_nothing_does_not_leave_the_others_waiting():
    alone = SimpleNamespace(size=lambda axis: 1)

    def work(replica, rank, group):
        model = Counting(rank)
        Counters(model, torch.nn.Identity(), alone, CPU).sum(group)
        # The next thing that all processes do, which would be mistaken for the sum.
        group.sum(torch.ones(1))
        return [counts.tolist() for counts in model.counts]

    assert replicas(work) == {(replica, rank): [[2.0, 4.0]] if rank else [] for replica in (0, 1) for rank in (0, 1)}
