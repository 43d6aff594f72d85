"""Stage F: one process of eight, its collectives fakes that move nothing, against what `cosmos plan` counts of it.

Gradients are made of what memory held before: only sizes are looked at.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from step import documents, model_of, planned
from torch.testing._internal.distributed.fake_pg import FakeStore

from cosmos_core.config.schema import MeshConfig, ParallelConfig, PolicyConfig
from cosmos_core.models.parallel.channel import Channel
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.policy.processes.world import World
from cosmos_core.policy.training.gradients import local
from cosmos_core.run.planning.footprint import size
from cosmos_core.testing.layouts import make_trainer, train_step
from tests.families import CONFIGS
from tests.gpu.qualify.checks import ROOT
from tests.gpu.qualify.trainer import SPREAD, lacks_room
from tests.gpu.qualify.where import Where

PROCESSES = 8


def fake_rank(
    where: Where, name: str, *, config: str, tiny: str, mesh: Mapping[str, int], units: int, recompute: str
) -> None:
    """Weights, gradients and moments of the first process, and on CUDA its peak during a step.

    Args:
        where: It runs.
        name: Of the check.
        config: Folder of `recipes/configs` with the model's config.
        tiny: The model of `tests/families.py` in its place where shapes are tiny.
        mesh: Processes along axes, eight in all.
        units: Of a micro-batch, and of the step; in documents of 2,048.
        recompute: As of `policy.parallel`.
    """
    path = ROOT / "recipes" / "configs" / config / "config.json"
    read: dict[str, Any] = CONFIGS[tiny] if where.is_tiny else json.loads(path.read_text())
    # A checkpoint's config may name what its class does not know, which a recipe's may not.
    read = {key: value for key, value in read.items() if key != "max_window_layers"}
    document, units = (64, 512) if where.is_tiny else (2048, units)
    policy = PolicyConfig(
        precision="bf16" if where.device == "cuda" else "fp32",
        micro_batch_units=units,
        mesh=MeshConfig(**mesh),
        parallel=ParallelConfig(compile="off", recompute=recompute),
    )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=PROCESSES)
    try:
        # The others' word that a small model of its make is right never comes.
        with model_of(read) as model, mock.patch("cosmos_core.models.small.open_channel", Channel):
            memory = planned(policy, model)
            if reason := lacks_room(where, memory):
                where.skipped(name, reason)
                return
            trainer = make_trainer(
                model, policy, World(form_mesh(policy.mesh, where.device)), device=torch.device(where.device)
            )
            payloads = documents([document] * (units // document), model.facts().vocab_size)
        held = {"parameters": [local(each) for each in trainer.module.parameters()]}
        held["gradients"] = [local(each.grad) for each in trainer.module.parameters() if each.grad is not None]
        held["optimizer"] = [local(each) for key, each in trainer.optimizer.state().items() if "exp_avg" in key]
        for part, tensors in held.items():
            took = sum(tensor.nbytes for tensor in tensors)
            bounds = {"least": 0.99, "most": 1.01, "note": size(took)}
            where.right(f"{name}: {part} / plan", took / memory.device[part], **bounds)
        if where.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with mock.patch.object(dist, "all_to_all_single", _as_sent):
            train_step(trainer, payloads)
        if where.device == "cuda":
            peak, expected = torch.cuda.max_memory_allocated(), sum(memory.device.values())
            note = f"planned {size(expected)}, took {size(peak)}"
            where.speed(f"{name}: peak / plan", peak / expected, least=1 - SPREAD, most=1 + SPREAD, note=note)
    finally:
        dist.destroy_process_group()


def _as_sent(received: torch.Tensor, sent: torch.Tensor, *_: Any, **__: Any) -> None:
    """What comes back is what was sent: how many rows arrive for each expert is read of it."""
    received.copy_(sent)
