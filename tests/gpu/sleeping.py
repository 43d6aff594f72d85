"""Lets an engine sleep and wake, in a process of its own; it prints what came of it as one line of JSON.

    python -m tests.gpu.sleeping vllm cuda '{"compile": true}' '{"head_dim": 64}'

A process has one vLLM, since what vLLM gives up in its sleep belongs to the whole process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from cosmos_core.models.tokens import token_array
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import EngineContext, Model, ModelContext, Request, Sampling
from cosmos_core.testing.conformance.engine.subject import TINY, EngineDriver, stopping_at
from cosmos_core.types import JSON, Payload
from cosmos_core.weights.digest import digest_of
from cosmos_core.weights.shards import canonical_tensors

ROOT: Final = Path(__file__).resolve().parents[2]
IN_FLIGHT: Final = 4
UNITS: Final = 160


def sleeping(engine: str, device: str, options: JSON, config: JSON) -> dict[str, Any]:
    """What `slept` finds, in another process.

    Raises:
        RuntimeError: It failed; has the end of what it printed.
    """
    command = [sys.executable, "-m", __spec__.name, engine, device, json.dumps(options), json.dumps(config)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[2:])}:\n{done.stderr[-4000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def slept(engine: str, device: torch.device, options: JSON, config: Mapping[str, JSON]) -> dict[str, Any]:
    """Load weights, sleep with sequences in flight, wake, and load the same weights again.

    Returns:
        weights_bytes: Size of the weights.
        freed_bytes: By how much more of the GPU was free while it slept; 0 on a CPU.
        attested: Whether both digests are that of what was loaded.
        furthest: The largest difference of log-probs of the same units, before and after.
        units: Those of each sequence that was in flight.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = ModelContext(path=None, config={**TINY, **config}, assets=Path(folder))
        made: Model = PluginSet.load([("model", "hf")]).create("model", "hf", {}, context)
        made.prepare([], {"build": "byte-bpe", "vocab_size": 270, "split_digits": True})
        model, dtype = stopping_at(made, ()), torch.bfloat16 if device.type == "cuda" else torch.float32
        tensors = canonical_tensors(model.build(seed=1, dtype=dtype, device=torch.device("cpu")))
        serving = EngineContext(
            model=model, dtype=dtype, device=device, max_in_flight=IN_FLIGHT, context_length=256, seed=0, sleeps=True
        )
        started = PluginSet.load([("engine", engine)]).create("engine", engine, options, serving)
        driver = EngineDriver(started, timeout_s=120.0, start_timeout_s=600.0)
        driver.start()
        try:
            return _through_sleep(driver, tensors, device)
        finally:
            driver.shutdown()


def _through_sleep(driver: EngineDriver, tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, Any]:
    digests = [driver.load(1, tensors)]
    payloads = [each[0].payload for each in driver.generate([_request(f"first {index}", 16) for index in range(3)])]
    before = driver.score(payloads, temperature=1.0)
    handles = driver.submit([_request(f"long {index}", UNITS) for index in range(IN_FLIGHT)])
    driver.pause_in_flight(handles, driver.stats().generated_units + 12)
    awake = _free(device)
    driver.sleep()
    freed = _free(device) - awake
    driver.wake()
    digests.append(driver.load(2, tensors))
    after = driver.score(payloads, temperature=1.0)
    driver.resume()
    return {
        "weights_bytes": sum(each.nbytes for each in tensors.values()),
        "freed_bytes": freed,
        "attested": set(digests) == {digest_of(tensors)},
        "furthest": max((a - b).abs().max().item() for a, b in zip(before, after, strict=True)),
        "units": [driver.results(handle)[0].num_units for handle in handles],
    }


def _request(name: str, units: int) -> Request:
    prompt: Payload = Payload(kind="tokens", arrays={"prompt": token_array(np.arange(3, 11 + len(name)))})
    return Request(request_id=name, prompt=prompt, sampling=Sampling(max_units=units), seed=len(name))


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


if __name__ == "__main__":
    name, where, given, shape = sys.argv[1:]
    print(json.dumps(slept(name, torch.device(where), json.loads(given), json.loads(shape))))
