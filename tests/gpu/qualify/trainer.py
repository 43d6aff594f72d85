"""Stage B: steps of the trainer at real shapes, each way in a process of its own (benchmarks/step.py)."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from typing import Any, Final

import attrs
import torch
from step import QWEN3, SHAPES, Way, in_a_process, model_of, planned

from cosmos_core.replica.utilisation import peak_of
from cosmos_core.run.planning.footprint import USABLE, size, verdict
from cosmos_core.run.planning.memory import RankMemory
from tests.gpu.qualify.checks import CHECKS
from tests.gpu.qualify.where import Where

SPREAD: Final = 0.1
"""Of peak memory round the plan's count."""


def step(
    where: Where,
    name: str,
    *,
    mfu: float | None = None,
    base: str = "",
    times: float | None = None,
    **settings: Any,
) -> None:
    """Tokens a second, utilisation, and memory against the plan.

    Args:
        where: It runs.
        name: Of the check.
        mfu: Least utilisation, in percent.
        base: Another check of this stage, with whose speed this one's is compared.
        times: Least that it is of that speed.
        settings: Of this way.
    """
    asked = _way(where, **settings)
    if reason := _lacks_compiler(where, asked) or _lacks_room(where, asked):
        where.skipped(name, reason)
        return
    found = _measured(where, asked)
    speed = found["tokens"] / found["seconds"]
    where.speed(f"{name}: tokens/s", speed)
    where.speed(f"{name}: useful work", found["flops"] / found["seconds"] / 1e12, "TFLOP/s")
    _utilisation(where, name, found, mfu)
    _memory(where, name, found)
    if base:
        settings = next(dict(check.settings) for check in CHECKS["B"] if check.name == base)
        settings.pop("mfu", None)
        other = _measured(where, _way(where, **settings))
        where.speed(f"{name}: times {base}", speed / (other["tokens"] / other["seconds"]), least=times)


def _utilisation(where: Where, name: str, found: Mapping[str, Any], least: float | None) -> None:
    if peak := peak_of(torch.device(where.device)):
        where.speed(f"{name}: of the peak (MFU)", 100 * found["flops"] / found["seconds"] / peak, "%", least=least)
    elif not where.is_tiny:
        where.skipped(f"{name}: of the peak (MFU)", "cosmos_core.replica.utilisation lists no peak of this device")


def _memory(where: Where, name: str, found: Mapping[str, Any]) -> None:
    told = f"planned {size(found['planned_bytes'])}"
    if where.device != "cuda":
        where.skipped(f"{name}: memory", f"{told}; torch counts what was taken on GPUs only")
        return
    ratio, bounds = found["peak_bytes"] / found["planned_bytes"], {"least": 1 - SPREAD, "most": 1 + SPREAD}
    where.speed(f"{name}: memory / plan", ratio, **bounds, note=f"{told}, took {size(found['peak_bytes'])}")


def _way(where: Where, **settings: Any) -> Way:
    """A way at its real shape, or at a tiny one."""
    if not where.is_tiny:
        return Way(**settings)
    tiny = {"shape": where.shape(settings["shape"]), "device": where.device, "tokens": 512, "document": 64, "steps": 1}
    return Way(**{**settings, **tiny})


def _lacks_compiler(where: Where, asked: Way) -> str:
    """The reason why a way cannot be compiled for a CPU; empty if it can, or need not."""
    compiler = os.environ.get("CXX", "g++")
    if where.device != "cpu" or asked.compile == "off" or shutil.which(compiler):
        return ""
    return f"compiling for a CPU takes a C++ compiler, and there is no {compiler}"


def _lacks_room(where: Where, asked: Way) -> str:
    """The reason why this GPU does not hold a way; empty if it does."""
    with model_of({**QWEN3, **SHAPES[asked.shape]}) as model:
        return lacks_room(where, planned(asked.policy(), model))


def lacks_room(where: Where, memory: RankMemory) -> str:
    """The reason why this GPU does not hold what a process takes; empty if it does."""
    if where.device != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info()
    if sum(memory.device.values()) <= USABLE * free:
        return ""
    return f"{verdict([memory], 'cuda')}; this one has {size(total)}, {size(free)} of it free"


def _measured(where: Where, asked: Way) -> dict[str, Any]:
    """A step; what was measured before in this stage is not measured again."""
    told = json.dumps(attrs.asdict(asked))
    kept = where.folder / f"{hashlib.sha256(told.encode()).hexdigest()}.json"
    if not kept.exists():
        found = in_a_process(asked)
        if isinstance(found, str):
            raise RuntimeError(found)
        kept.write_text(json.dumps(found))
    result: dict[str, Any] = json.loads(kept.read_text())
    return result
