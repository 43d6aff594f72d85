"""Draws of vLLM's own, for whole batches."""

import logging

import torch

from cosmos_core.protocols import EngineContext
from cosmos_engine_vllm.backend import own_seed


def test_each_start_of_a_replica_draws_from_a_seed_of_its_own_which_is_told(caplog):
    caplog.set_level(logging.INFO)

    def seed(run, replica):
        context = EngineContext(
            model=None, dtype=torch.float32, device=torch.device("cpu"), max_in_flight=1, context_length=8, seed=run,
            replica=replica,
        )  # fmt: skip
        return own_seed(context)

    starts = [(1, "rollout-0 a1"), (1, "rollout-0 b2"), (1, "rollout-1 a1"), (2, "rollout-0 a1")]
    seeds = [seed(*start) for start in starts]
    assert seeds == [seed(*start) for start in starts]
    assert len({*seeds}) == 4
    assert all(0 <= each < 1 << 32 for each in seeds)
    assert f"from seed {seeds[0]} (run.seed 1)" in caplog.text
