"""Draws of vLLM's own, for whole batches, and how its refusals are told."""

import logging
from types import SimpleNamespace

import torch

from cosmos_core.protocols import EngineContext
from cosmos_engine_vllm.backend import Backend, own_seed


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


def test_a_refusal_tells_of_heads_and_of_memory_where_these_are_the_reason():
    def told(error, *, size=64, is_cpu=False):
        backend = object.__new__(Backend)
        backend._is_cpu, backend._architecture = is_cpu, "Tiny"
        backend._context = SimpleNamespace(model=SimpleNamespace(facts=lambda: SimpleNamespace(head_size=size)))
        return str(backend._refusal(error))

    assert told(RuntimeError("no driver")) == "vLLM did not start with Tiny: RuntimeError: no driver"
    assert told(RuntimeError("no kernel"), size=24) == told(RuntimeError("no kernel"), is_cpu=True)
    assert "heads have 32, 64, " in told(RuntimeError("no kernel"), size=24, is_cpu=True)
    assert "values, and these have 24: RuntimeError: no kernel" in told(RuntimeError("no kernel"), size=24, is_cpu=True)
    small = "Free memory on device is less than desired GPU memory utilization (0.85)"
    for error in (ValueError(small), torch.OutOfMemoryError("CUDA out of memory")):
        assert told(error).endswith(
            f"{error}; what vLLM calls gpu_memory_utilization is rollout.engine.options.memory_share"
        )
