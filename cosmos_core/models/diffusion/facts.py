"""What planning is told of a transformer for diffusion: from its shell, without weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import attrs
from torch import nn

from cosmos_core.models.activations import AFTER_LAYERS, BEFORE_LAYERS, UNTRACEABLE, kept_by
from cosmos_core.protocols import Compute, Extent, Kept, ModelFacts, ModelPart

_NO_LIMIT = 1 << 20
"""Decisions do not attend to one another, so there can be any number."""


def facts_of(
    shell: nn.Module,
    *,
    layers: str,
    heads: int,
    hidden_size: int,
    num_tokens: int,
    latent_size: int,
    num_regressions: int,
    absent: str,
    uncounted: tuple[str, ...],
    forward: Callable[[int], None],
) -> ModelFacts:
    """Describe a transformer.

    Args:
        shell: On meta; it is of no use afterwards.
        layers: Name of the list of its blocks.
        heads: Attention heads of each.
        hidden_size: Width between blocks.
        num_tokens: Tokens of what the recipe has it generate.
        latent_size: Values of its latents.
        num_regressions: Decisions drawn of a demonstration.
        absent: What is missing of a checkpoint; empty if nothing is.
        uncounted: What its processes hold besides.
        forward: Calls the shell for so many decisions.
    """
    architecture = type(shell).__name__
    whole = _parts(shell, layers)
    kept = _kept(shell, layers, forward)
    places = (BEFORE_LAYERS, 0, AFTER_LAYERS)
    parts = tuple(attrs.evolve(part, kept=kept.get(place, {})) for part, place in zip(whole, places, strict=True))
    return ModelFacts(
        architecture=architecture,
        num_parameters=sum(part.count * part.num_parameters for part in parts),
        num_layers=whole[1].count,
        hidden_size=hidden_size,
        vocab_size=0,
        tokenizer_size=0,
        context_length=_NO_LIMIT,
        stop_ids=frozenset(),
        pad_id=0,
        head_size=hidden_size // heads,
        parts=parts,
        extents=(
            Extent(axis="cp", name="attention heads", size=heads),
            Extent(axis="cp", name="tokens of a video", size=num_tokens),
        ),
        absent_weights=absent,
        latent_size=latent_size,
        num_regressions=num_regressions,
        rows_per_unit=num_tokens,
        uncounted=uncounted,
    )


def _parts(shell: nn.Module, layers: str) -> tuple[ModelPart, ModelPart, ModelPart]:
    """What comes before the blocks, the blocks, and what comes after them."""
    blocks = list(shell.get_submodule(layers).children())
    names = [name for name, _ in shell.named_children()]
    before = _count(*(shell.get_submodule(name) for name in names[: names.index(layers)]))
    inside = _count(*blocks)
    return (
        ModelPart(name="embedding", num_parameters=before),
        ModelPart(
            name=f"layers 1-{len(blocks)}" if len(blocks) > 1 else "layer 1",
            count=len(blocks),
            is_layer=True,
            num_parameters=inside // len(blocks),
            widths=_widths(blocks[0]),
        ),
        ModelPart(name="head", num_parameters=_count(shell) - inside - before),
    )


def _kept(shell: nn.Module, layers: str, forward: Callable[[int], None]) -> Mapping[int, Mapping[Compute, Kept]]:
    """What each decision keeps before, in and after the blocks, which are alike; nothing where it cannot be traced."""
    block = next(shell.get_submodule(layers).children())
    shell.set_submodule(layers, nn.ModuleList([block]))
    try:
        with warnings.catch_warnings():
            # Norms that keep float32 weights under autocast: nothing is computed here.
            warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
            return kept_by(shell, [block], lambda decisions: lambda: forward(decisions))
    except UNTRACEABLE:
        return {}


def _count(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _widths(block: nn.Module) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, child in block.named_modules():
        if isinstance(child, nn.Linear):
            last = name.rpartition(".")[2]
            found[last] = found.get(last, 0) + child.in_features + child.out_features
    return found
