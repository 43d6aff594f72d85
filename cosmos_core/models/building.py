"""Builds a process's part of a model: cut, laid over the mesh, and only then given memory and weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from cosmos_core.errors import PluginIncompatibleError
from cosmos_core.models.parallel.expert import is_experts
from cosmos_core.models.parallel.float8 import check_float8
from cosmos_core.models.parallel.lora import check_adapted, draw_adapters, with_adapters
from cosmos_core.models.parallel.parallelize import parallelize
from cosmos_core.models.parallel.plan import plan_for
from cosmos_core.models.parallel.stages import Anatomy, Stages, cut
from cosmos_core.models.weights import loading
from cosmos_core.models.weights.streaming import Streamed, fill, materialise, weights_of
from cosmos_core.protocols import Layout


@attrs.frozen(kw_only=True, eq=False)
class Blueprint:
    """A model that is to be built: with weights of the checkpoint at `path`, or where that is None with drawn ones.

    `is_packed` says that its layers attend within packed documents; else they attend as transformers has it.
    """

    config: PretrainedConfig
    path: str | None
    seed: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    trust_remote_code: bool
    auto_class: Any
    tensor_plan: Mapping[str, str]
    is_packed: bool = True


def build_whole(blueprint: Blueprint) -> PreTrainedModel:
    """All of it in this process."""
    if blueprint.path is None:
        return draw(blueprint).to(device=blueprint.device, dtype=blueprint.dtype).eval()
    shell = make_shell(blueprint)
    streamed = Streamed(blueprint.path, shell)
    materialise([shell], device=blueprint.device)
    fill([shell], streamed.read, blueprint.path)
    return shell


def lay_out(module: PreTrainedModel, blueprint: Blueprint, layout: Layout) -> None:
    """Apply to all of it in this process what a layout of one process may ask for."""
    _check(module, blueprint, layout)
    parallelize(module, layout, plan_for(module, blueprint.tensor_plan), blueprint.device)
    draw_adapters(module, blueprint.seed)


def build_part(blueprint: Blueprint, layout: Layout) -> nn.Module:
    """This process's part of it; every process of the mesh calls it.

    Weights of a checkpoint are streamed into shards. Weights that are drawn are drawn whole, on the CPU, and what the
    process does not hold is dropped: transformers draws in an order of its own, module within module, of which a part
    alone cannot be had. On the meta device there are none.
    """
    shell, is_filled = make_shell(blueprint), blueprint.device.type != "meta"
    _check(shell, blueprint, layout)
    # Before anything is split, so that every process finds the same fault in a checkpoint.
    streamed = Streamed(blueprint.path, shell).read if blueprint.path is not None and is_filled else None
    stages = cut(shell, layout) if layout.mesh.size("pp") > 1 else [shell]
    for stage in stages:
        parallelize(stage, layout, plan_for(stage, blueprint.tensor_plan), blueprint.device)
    if is_filled:
        materialise(stages, device=blueprint.device, offload=layout.cpu_offload)
        weights = streamed or weights_of(draw(blueprint))
        fill(stages, with_adapters(weights, blueprint.seed), blueprint.path)
    return Stages(stages) if layout.mesh.size("pp") > 1 else stages[0]


def make_shell(blueprint: Blueprint) -> PreTrainedModel:
    """All of it without storage."""
    how = {"trust_remote_code": blueprint.trust_remote_code, "is_packed": blueprint.is_packed}
    return loading.make_shell(blueprint.config, blueprint.auto_class, **how).to(blueprint.dtype)


def _check(module: PreTrainedModel, blueprint: Blueprint, layout: Layout) -> None:
    check_float8(module, layout, blueprint.device)
    anatomy, name = Anatomy.of(module), type(module).__name__
    layers = () if anatomy is None else anatomy.layers
    has_experts = any(is_experts(each) for layer in layers for each in layer.modules())
    if layout.lora is not None:
        check_adapted(layers, name, layout.lora)
    # A model without a list of layers is refused as such.
    if layout.mesh.size("ep") > 1 and layers and not has_experts:
        raise PluginIncompatibleError(
            f"{name} has no experts module that can be spread over processes: set policy.mesh.ep = 1"
        )


def draw(blueprint: Blueprint) -> PreTrainedModel:
    """All of it with weights drawn from the seed in float32 on the CPU: the same bits on every machine and device."""
    how: dict[str, Any] = {"trust_remote_code": blueprint.trust_remote_code, "dtype": torch.float32}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(blueprint.seed)
        return loading.make(blueprint.config, blueprint.auto_class, is_packed=blueprint.is_packed, **how)
