"""Pipelines of every schedule against one process, over the layouts that the unit tests leave out."""

import pytest

from cosmos_core.testing.worlds import WorldFailedError, run_world
from tests.unit.policy.mesh.test_pipeline import SCHEDULES, check, failing, idle, tiny


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_layouts(schedule):
    check(tiny("llama", is_tied=False), {"pp": 4}, schedule, numbers=(5,))
    for frees in (False, True):
        check(tiny("qwen3", is_tied=True, layers=4), {"pp": 2, "dp_shard": 2}, schedule, numbers=(3, 2), frees=frees)
    check(tiny("qwen3", is_tied=False, layers=4), {"pp": 2}, schedule, numbers=(3,), recompute="full")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_error_of_a_stage_surfaces_as_it_is(schedule):
    with pytest.raises(WorldFailedError, match=r"(?s)rank . of 2 failed.*\n.*DataError: the loss of a micro-batch\n$"):
        run_world(2, failing, schedule)


def test_a_step_without_micro_batches():
    answers = run_world(2, idle, "interleaved")
    assert answers == [None, []]
