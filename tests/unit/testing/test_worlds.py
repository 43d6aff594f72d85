import os
from multiprocessing import forkserver

import pytest
import torch
import torch.distributed as dist

from cosmos_core.testing.worlds import WorldFailedError, run_world


def add(number):
    total = torch.tensor([dist.get_rank() + number])
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def fail_on(rank):
    if dist.get_rank() == rank:
        raise ValueError("no such luck")
    dist.barrier()


def die_on(rank):
    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()


def test_results_are_in_the_order_of_ranks():
    assert run_world(2, add, 10) == [(0, 21), (1, 21)]


def test_nothing_is_imported_before_a_fork_where_a_gpu_is_seen(monkeypatch):
    for is_seen in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_seen=is_seen: is_seen)
        assert run_world(1, add, 1) == [(0, 1)]
        assert bool(forkserver._forkserver._preload_modules) != is_seen


def test_processes_have_other_hashes_than_this_one():
    assert run_world(1, hash, "text") != [hash("text")]


def test_the_first_process_that_fails_or_dies_is_told_at_once():
    with pytest.raises(WorldFailedError, match=r"(?s)rank 1 of 2 failed.*no such luck"):
        run_world(2, fail_on, 1, timeout_s=30)
    with pytest.raises(WorldFailedError, match=r"rank [01] of 2"):
        run_world(2, die_on, 1, timeout_s=30)
