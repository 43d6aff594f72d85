"""Builds a process's part of a transformer: on meta, laid over the mesh, and only then given memory and weights.

Planning is told of it from the shell alone, without weights (`facts_of`).
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from cosmos_core.errors import ConfigError, PluginIncompatibleError
from cosmos_core.models.activations import AFTER_LAYERS, BEFORE_LAYERS, kept_by
from cosmos_core.models.diffusion.checkpoint import StreamedTransformer
from cosmos_core.models.diffusion.context import TokenSlices
from cosmos_core.models.diffusion.family import Family
from cosmos_core.models.parallel.anatomy import layers_name, widths
from cosmos_core.models.parallel.forwards import root
from cosmos_core.models.parallel.lora import add_adapters, check_adapted, surround_adapted, with_adapters
from cosmos_core.models.parallel.parallelize import shard
from cosmos_core.models.parallel.recompute import recompute_layer
from cosmos_core.models.weights.loading import LIBRARY_ERRORS, first_line
from cosmos_core.models.weights.streaming import fill, materialise, weights_of
from cosmos_core.protocols import Layout, ModelFacts
from cosmos_core.protocols.facts import Compute, Extent, Kept, ModelPart


@attrs.frozen(kw_only=True, eq=False)
class Blueprint:
    """A transformer that is to be built: with the weights in `folder`, or where that is None with drawn ones."""

    family: Family
    folder: Path | None
    seed: int
    dtype: torch.dtype
    device: torch.device


def make_shell(family: Family) -> nn.Module:
    """The transformer on the meta device, in evaluation mode: nothing is allocated."""
    # It imports diffusers, of which nothing shall be on meta.
    config = family.config
    with torch.device("meta"):
        return _made(family, config)


def draw(blueprint: Blueprint) -> nn.Module:
    """All of it with weights drawn from the seed, in float32 on the CPU."""
    config = blueprint.family.config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(blueprint.seed)
        return _made(blueprint.family, config)


def build(blueprint: Blueprint, layout: Layout | None) -> nn.Module:
    """All of it, or this process's part; every process of the mesh calls it."""
    shell, folder = _cast(make_shell(blueprint.family), blueprint.dtype), blueprint.folder
    # Before anything is split, so that every process finds the same fault in a checkpoint.
    streamed = None if folder is None else StreamedTransformer(str(folder), shell).read
    if layout is not None:
        lay_out(shell, blueprint, layout)
    offload = layout is not None and layout.cpu_offload
    buffers = functools.partial(_compute_buffers, blueprint.family)
    materialise([shell], device=blueprint.device, offload=offload, compute_buffers=buffers)
    weights = streamed or weights_of(draw(blueprint))
    fill([shell], with_adapters(weights, blueprint.seed), None if folder is None else str(folder))
    return shell


def lay_out(module: nn.Module, blueprint: Blueprint, layout: Layout) -> None:
    """Split a transformer's parameters and change its forwards, in place; the order is that of language models."""
    if layout.float8 != "none":
        raise ConfigError("policy.float8.scaling: world models are not computed in 8 bits; set it to 'none'")
    if layout.cpu_offload and layout.mesh.world_size == 1:
        raise ConfigError("policy.parallel.cpu_offload: it is FSDP's, which a replica of one process does without")
    name = blueprint.family.layers
    blocks = _blocks(module, name)
    if layout.lora is not None:
        check_adapted(blocks, type(module).__name__, layout.lora)
    layers = {f"{name}.{number}": block for number, block in enumerate(blocks)}
    add_adapters(module, surround_adapted(layers, layout), layout)
    slices = TokenSlices.of(layout)
    for block in blocks:
        if layout.compile:
            block.forward = torch.compile(block.forward)
        recompute_layer(block, layout.recompute)
    if slices is not None:
        blueprint.family.spread(module, slices)
    root(module, layout)
    if layout.mesh.world_size > 1:
        shard(module, blocks, [], None, layout)


def _blocks(module: nn.Module, layers: str) -> Sequence[nn.Module]:
    return list(module.get_submodule(layers).children())


def _made(family: Family, config: Mapping[str, Any]) -> nn.Module:
    try:
        module = family.make(config)
    except LIBRARY_ERRORS as error:
        raise ConfigError(f"model.config: {first_line(error)}") from error
    return module.eval()


def _cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Parameters as the dtype; buffers stay as they are: rotary angles are float32 on purpose."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module


def _compute_buffers(family: Family, shell: nn.Module, device: torch.device) -> None:
    computed, saved = family.computed(family.config), shell.state_dict().keys()
    for name, buffer in list(shell.named_buffers()):
        if name in saved:
            continue
        if name not in computed:
            raise PluginIncompatibleError(
                f"{type(shell).__name__}: the buffer {name} is in no checkpoint, and the plugin does not compute it"
            )
        owner, _, last = name.rpartition(".")
        setattr(shell.get_submodule(owner), last, computed[name].to(device=device, dtype=buffer.dtype))


def facts_of(
    family: Family, shell: nn.Module, *, absent: str, uncounted: tuple[str, ...], forward: Callable[[int], None]
) -> ModelFacts:
    """Describe a transformer on meta, which is of no use afterwards.

    `absent` says what is missing of a checkpoint, if anything is, and `uncounted` what its processes hold besides.
    `forward` calls the shell for so many decisions.
    """
    heads, head_size = int(family.config["num_attention_heads"]), int(family.config["attention_head_dim"])
    whole = _parts(shell, family.layers)
    kept = _kept(shell, family.layers, forward)
    places = (BEFORE_LAYERS, 0, AFTER_LAYERS)
    parts = tuple(attrs.evolve(part, kept=kept.get(place, {})) for part, place in zip(whole, places, strict=True))
    return ModelFacts(
        architecture=type(shell).__name__,
        num_parameters=sum(part.count * part.num_parameters for part in parts),
        num_layers=whole[1].count,
        hidden_size=heads * head_size,
        vocab_size=0,
        tokenizer_size=0,
        # Decisions do not attend to one another, so there can be any number.
        context_length=1 << 20,
        stop_ids=frozenset(),
        pad_id=0,
        head_size=head_size,
        parts=parts,
        extents=(
            Extent(axis="cp", name="attention heads", size=heads),
            Extent(axis="cp", name="tokens of a video", size=family.num_tokens),
        ),
        absent_weights=absent,
        latent_size=math.prod(family.shape),
        num_regressions=family.options.regressions,
        rows_per_unit=family.num_tokens,
        uncounted=uncounted,
    )


def _parts(shell: nn.Module, layers: str) -> tuple[ModelPart, ModelPart, ModelPart]:
    """The modules before the blocks, the blocks, and the modules after them."""
    blocks = _blocks(shell, layers)
    inside = _count(shell.get_submodule(layers))
    before = sum(_count(child) for _, child in takewhile(lambda named: named[0] != layers, shell.named_children()))
    return (
        ModelPart(name="embedding", num_parameters=before),
        ModelPart(
            name=layers_name(1, len(blocks)),
            count=len(blocks),
            is_layer=True,
            num_parameters=inside // len(blocks),
            widths=widths(blocks[0]),
        ),
        ModelPart(name="head", num_parameters=_count(shell) - inside - before),
    )


def _kept(shell: nn.Module, layers: str, forward: Callable[[int], None]) -> Mapping[int, Mapping[Compute, Kept]]:
    """Bytes that a decision keeps before, in and after the blocks, which are alike; none if they cannot be traced."""
    block = _blocks(shell, layers)[0]
    shell.set_submodule(layers, nn.ModuleList([block]))
    with warnings.catch_warnings():
        # Norms that keep float32 weights under autocast: nothing is computed here.
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        return kept_by(shell, [block], lambda decisions: lambda: forward(decisions))


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
