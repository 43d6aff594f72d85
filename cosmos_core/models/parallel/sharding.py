"""Sharded data parallelism: weights spread over the processes that see different data, gathered layer by layer.

Losses are weighted over the whole batch, so gradients are sums over processes, never means. They are reduced in
float32 at least. Those of `dp_replicate` are summed by the trainer, once a step.

Source: arXiv:2304.11277; the implementation is `torch.distributed.fsdp.fully_shard`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from cosmos_core.errors import ConfigError
from cosmos_core.protocols import Layout


def shard(
    root: nn.Module,
    layers: Sequence[nn.Module],
    experts: Sequence[nn.Module],
    embedding: nn.Module | None,
    layout: Layout,
) -> None:
    """Shard a module: experts, each layer, the embedding, and the rest as one, which is gathered throughout.

    The embedding is None where it shares weights with another module.

    Raises:
        ConfigError: Weights shall stay in CPU memory, and there is no accelerator.
    """
    mesh = layout.mesh.weights
    if layout.cpu_offload and mesh.device_type == "cpu":
        raise ConfigError(
            "policy.parallel.cpu_offload: weights are in CPU memory already; it is for policy.device = 'cuda'"
        )
    precision = getattr(torch, layout.micro_batch_precision)
    options: dict[str, Any] = {
        "reshard_after_forward": layout.reshard_after_forward,
        # Layers get inputs as transformers makes them: some are float32 on purpose, such as routing weights.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=None if precision == torch.float32 else precision,
            reduce_dtype=torch.promote_types(precision, torch.float32),
            cast_forward_inputs=False,
        ),
        **({"offload_policy": CPUOffloadPolicy()} if layout.cpu_offload else {}),
    }
    for module in experts:
        fully_shard(module, mesh=layout.mesh.expert_weights, **options)
    for module in (*layers, *(() if embedding is None else (embedding,)), root):
        fully_shard(module, mesh=mesh, **options)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
