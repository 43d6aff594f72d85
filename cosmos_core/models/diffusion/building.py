"""Builds a process's part of a transformer: on meta, laid over the mesh, and only then given memory and weights.

Planning is told of it from the shell alone, without weights (`facts_of`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cosmos_core.errors import ConfigError, PluginIncompatibleError
from cosmos_core.models.activations import AFTER_LAYERS, BEFORE_LAYERS, kept_by
from cosmos_core.models.diffusion.checkpoint import StreamedTransformer
from cosmos_core.models.diffusion.context import TokenSlices
from cosmos_core.models.diffusion.family import Family
from cosmos_core.models.parallel.compiled import economise
from cosmos_core.models.parallel.forwards import root
from cosmos_core.models.parallel.lora import add_adapters, check_adapted, surround_adapted, with_adapters
from cosmos_core.models.parallel.offload import offload
from cosmos_core.models.parallel.parallelize import shard
from cosmos_core.models.parallel.stages import layers_name, widths
from cosmos_core.models.weights.loading import LIBRARY_ERRORS, first_line
from cosmos_core.models.weights.streaming import fill, materialise, weights_of
from cosmos_core.protocols import Layout, ModelFacts
from cosmos_core.protocols.facts import Compute, Extent, Kept, ModelPart


def make_shell(family: Family) -> nn.Module:
    """The transformer on the meta device, in evaluation mode: nothing is allocated."""
    # It imports diffusers, of which nothing shall be on meta.
    config = family.config
    with torch.device("meta"):
        return _made(family, config)


def build(
    family: Family, folder: Path | None, layout: Layout | None, *, seed: int, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """All of a transformer, or this process's part, with the weights in `folder`, else with drawn ones.

    Every process of the mesh calls it. Weights are drawn in float32 on the CPU; on the meta device there are none.
    """
    shell = make_shell(family)
    for parameter in shell.parameters():
        # Buffers stay as they are: rotary angles are float32 on purpose.
        parameter.data = parameter.data.to(dtype)
    # Before anything is split, so that every process finds the same fault in a checkpoint.
    is_filled = device.type != "meta"
    streamed = StreamedTransformer(str(folder), shell).read if folder is not None and is_filled else None
    if layout is not None:
        lay_out(shell, family, layout)
    if not is_filled:
        return shell
    offload = layout is not None and layout.cpu_offload
    buffers = functools.partial(_compute_buffers, family)
    materialise([shell], device=device, offload=offload, compute_buffers=buffers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        weights = streamed or weights_of(_made(family, family.config))
    fill([shell], with_adapters(weights, seed), None if folder is None else str(folder))
    return shell


def lay_out(module: nn.Module, family: Family, layout: Layout) -> None:
    """Split a transformer's parameters and change its forwards, in place; the order is that of language models."""
    if layout.float8 != "none":
        raise ConfigError("policy.float8.scaling: world models are not computed in 8 bits; set it to 'none'")
    name = family.layers
    blocks = _blocks(module, name)
    if layout.lora is not None:
        check_adapted(blocks, type(module).__name__, layout.lora)
    layers = {f"{name}.{number}": block for number, block in enumerate(blocks)}
    add_adapters(module, surround_adapted(layers, layout), layout)
    slices = TokenSlices.of(layout)
    for block in blocks:
        economise(block, layout)
    if layout.offload_activations:
        offload(blocks)
    if slices is not None:
        family.spread(module, slices)
    root(module, layout)
    shard(module, blocks, [], None, layout)


def _blocks(module: nn.Module, layers: str) -> Sequence[nn.Module]:
    return list(module.get_submodule(layers).children())


def _made(family: Family, config: Mapping[str, Any]) -> nn.Module:
    try:
        module = family.make(config)
    except LIBRARY_ERRORS as error:
        raise ConfigError(f"model.config: {first_line(error)}") from error
    return module.eval()


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
    blocks = _blocks(shell, family.layers)
    inside = _count(shell.get_submodule(family.layers))
    children = takewhile(lambda named: named[0] != family.layers, shell.named_children())
    before = sum(_count(child) for _, child in children)
    after, num_parameters = _count(shell) - inside - before, _count(shell)
    kept, products = _traced(shell, family.layers, forward)
    parts = (
        ModelPart(name="embedding", num_parameters=before, kept=kept.get(BEFORE_LAYERS, {})),
        ModelPart(
            name=layers_name(1, len(blocks)),
            count=len(blocks),
            is_layer=True,
            num_parameters=inside // len(blocks),
            widths=widths(blocks[0]),
            kept=kept.get(0, {}),
        ),
        ModelPart(name="head", num_parameters=after, kept=kept.get(AFTER_LAYERS, {})),
    )
    return ModelFacts(
        architecture=type(shell).__name__,
        num_parameters=num_parameters,
        num_layers=len(blocks),
        hidden_size=heads * head_size,
        # Decisions do not attend to one another, so there can be any number.
        context_length=1 << 20,
        head_size=head_size,
        matrix_parameters=len(blocks) * products // family.num_tokens,
        attention_width=len(blocks) * heads * head_size,
        parts=parts,
        extents=(
            Extent(axis="cp", name="attention heads", size=heads),
            Extent(axis="cp", name="tokens of a video", size=family.num_tokens),
        ),
        context_methods=frozenset({"ulysses"}),
        absent_weights=absent,
        latent_size=math.prod(family.shape),
        num_regressions=family.options.regressions,
        rows_per_unit=family.num_tokens,
        uncounted=uncounted,
    )


def _traced(
    shell: nn.Module, layers: str, forward: Callable[[int], None]
) -> tuple[Mapping[int, Mapping[Compute, Kept]], int]:
    """Trace a decision before, in and after the blocks, which are alike; nothing is known if that cannot be done.

    Returns:
        The bytes that it keeps, and the products of a block's matrices: of latents, of text or of one vector, each
        with as many rows as go through it.
    """
    block = _blocks(shell, layers)[0]
    shell.set_submodule(layers, nn.ModuleList([block]))
    products: dict[nn.Module, int] = {}

    def prepare(decisions: int) -> Callable[[], None]:
        def note(linear: nn.Linear, _: object, rows_D: torch.Tensor) -> None:
            products[linear] = linear.in_features * rows_D.numel() // decisions

        def trace() -> None:
            hooks = [each.register_forward_hook(note) for each in block.modules() if isinstance(each, nn.Linear)]
            forward(decisions)
            for hook in hooks:
                hook.remove()

        return trace

    kept = kept_by(shell, [block], prepare)
    return kept, sum(products.values()) if kept else 0


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
