"""An engine that sleeps gives the GPU's memory up, and computes what it computed before once it has weights again.

vLLM's, on a GPU; with COSMOS_GPU_DEVICE=cpu the embedded engine's.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.gpu.sleeping import IN_FLIGHT, UNITS, sleeping

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_an_engine_computes_the_same_after_sleep(device: torch.device, *, compiles: bool) -> None:
    is_gpu = device.type == "cuda"
    if is_gpu and importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vllm, which is not installed")
    if compiles and not is_gpu:
        pytest.skip("vLLM is compiled on a GPU only")
    options = {"compile": compiles, **({"memory_share": 0.4} if is_gpu else {})}
    found = sleeping("vllm" if is_gpu else "embedded", device.type, options, {"head_dim": 64 if is_gpu else 8})
    assert found["attested"]
    assert found["furthest"] <= (0.02 if is_gpu else 1e-5)
    assert found["units"] == [UNITS] * IN_FLIGHT
    if is_gpu:
        total = torch.cuda.mem_get_info(device)[1]
        assert found["freed_bytes"] > 0.3 * total, "weights and KV cache took 0.4 of it"
