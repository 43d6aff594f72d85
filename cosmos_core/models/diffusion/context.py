"""Tokens of latents spread over `cp`: slices between attention, heads inside it.

Each process has one of `cp` equal slices of the tokens from the first block to the last. Two all-to-all turn slices of
tokens into slices of heads and back. What comes before the blocks is computed by each process whole and cut; what comes
after is joined, so that each process computes the same loss of the whole velocity.

Gradients: cutting keeps a process's own part, so that all parameters have partial gradients, whose sum is the gradient;
joining hands each process its own part of the whole gradient of the velocity, once.

Source: DeepSpeed-Ulysses (arXiv:2309.14509).

Shape legend: B latents, S tokens of all processes, U of one, H heads, D head dim, P = cp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import nn
from torch.nn import functional

from cosmos_core.errors import ConfigError
from cosmos_core.models.attention.documents import ContextSlice
from cosmos_core.models.parallel.collectives import all_to_all, gather_for_shared
from cosmos_core.models.parallel.forwards import surround
from cosmos_core.protocols import Layout


class TokenSlices(ContextSlice):
    """The slice of the tokens that each process of `cp` has: this one's is the `place`-th of `size`."""

    @staticmethod
    def of(layout: Layout | None) -> TokenSlices | None:
        """The slices of a layout; None where `cp` is 1.

        Raises:
            ConfigError: The layout wants attention over `cp` computed in another way.
        """
        found = ContextSlice.of(layout)
        if found is not None and found.method not in {"auto", "ulysses"}:
            raise ConfigError(
                f"policy.parallel.context: {found.method!r}, and world models exchange heads; use 'auto' or 'ulysses'"
            )
        return None if found is None else TokenSlices(**attrs.asdict(found, recurse=False))

    def cut(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This process's tokens of all; a ConfigError says that the tokens cannot be shared evenly."""
        count = tensor.shape[dim]
        if count % self.size:
            raise ConfigError(
                f"policy.mesh.cp: {self.size} does not divide the {count} tokens of a video; change the size of what "
                "is generated (model.options), or cp"
            )
        return tensor.narrow(dim, self.place * (count // self.size), count // self.size)

    def join(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """All tokens, from those of all processes."""
        return gather_for_shared(tensor, dim, self.group)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention of this process's tokens [B, U, H, D] to those of all processes; nothing is masked.

        Raises:
            ConfigError: `cp` does not divide the heads.
        """
        heads = query.shape[2]
        if heads % self.size:
            raise ConfigError(f"policy.mesh.cp: {self.size} does not divide the {heads} attention heads")
        # One exchange for all three: what goes to each process lies together.
        sent = torch.unflatten(torch.stack((query, key, value)), 3, (self.size, heads // self.size)).movedim(3, 0)
        received = torch.unflatten(all_to_all(sent.flatten(0, 1), self.group), 0, (self.size, 3))
        # [P, 3, B, U, H / P, D] to [3, B, H / P, S, D], in the order of slices.
        whole = received.movedim(0, 2).flatten(2, 3).transpose(2, 3)
        output_BHSD = functional.scaled_dot_product_attention(whole[0], whole[1], whole[2])
        back = torch.unflatten(output_BHSD, 2, (self.size, -1)).movedim(2, 0)
        parts_PBHUD = all_to_all(back, self.group)
        return parts_PBHUD.permute(1, 3, 0, 2, 4).flatten(2, 3)


def spread_blocks(blocks: Sequence[nn.Module], slices: TokenSlices, beside: Callable[..., tuple[Any, ...]]) -> None:
    """Let the first block take this process's tokens of all, and each block what belongs to these.

    The first argument of each block are the tokens [B, S, ...]; `beside` gives the others, with what belongs to single
    tokens cut.
    """
    for number, block in enumerate(blocks):

        def around(inner: Callable[..., Any], tokens: torch.Tensor, *others: Any, is_first: bool = number == 0) -> Any:
            return inner(slices.cut(tokens) if is_first else tokens, *beside(*others))

        surround(block, around)
