"""One block of attention with its log-sum-exp, forward and backward, as merging blocks needs it.

The backward pass of a block is given the output and the log-sum-exp of the *whole* softmax, of which the block is one
part: that makes its gradients terms of a sum.

Kernels: SDPA's flash kernels on CPUs and, in 16 bits, on CUDA; elsewhere scores in full.

Shape legend: Q queries, F keys, H heads, K key-value heads, D head dim, E = D + value dim.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import attrs
import torch
import torch.nn.functional as F  # noqa: N812 - the field's own name for it

Kernel: TypeAlias = Literal["cpu", "cuda", "full"]

aten = torch.ops.aten


@attrs.frozen(kw_only=True, eq=False)
class Block:
    """Queries [Q, H, D], and keys and values side by side [F, K, E]; causal blocks have as many of each."""

    query_QHD: torch.Tensor
    both_FKE: torch.Tensor
    is_causal: bool
    scale: float

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value, each [1, H, ·, D]: heads repeated, values widened by zeros to D."""
        D = self.query_QHD.shape[-1]
        group = self.query_QHD.shape[1] // self.both_FKE.shape[1]
        key, value = torch.split(self.both_FKE, [D, self.both_FKE.shape[-1] - D], dim=-1)
        value = F.pad(value, (0, D - value.shape[-1]))
        rows = (self.query_QHD, *(row.repeat_interleave(group, dim=1) for row in (key, value)))
        return tuple(row.transpose(0, 1)[None].contiguous() for row in rows)  # type: ignore[return-value]

    @property
    def value_dim(self) -> int:
        """Width of a value before it is widened."""
        return self.both_FKE.shape[-1] - self.query_QHD.shape[-1]


def kernel_of(tensor: torch.Tensor) -> Kernel:
    """The kernel for tensors like this one."""
    if tensor.device.type == "cpu":
        return "cpu"
    return "cuda" if tensor.is_cuda and tensor.dtype in {torch.float16, torch.bfloat16} else "full"


def block_forward(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [Q, H, value dim] and log-sum-exp [Q, H] in float32 of the softmax over the block's keys."""
    query, key, value = block.parts
    if not query.shape[2]:
        return block.query_QHD[..., : block.value_dim], query.new_empty(query.shape[2], query.shape[1]).float()
    kernel = kernel_of(query)
    if kernel == "cpu":
        output, lse = aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001 - SDPA gives no log-sum-exp
            query, key, value, 0.0, block.is_causal, scale=block.scale
        )
    elif kernel == "cuda":
        output, lse = aten._scaled_dot_product_flash_attention(  # noqa: SLF001 - SDPA gives no log-sum-exp
            query, key, value, 0.0, block.is_causal, scale=block.scale
        )[:2]
    else:
        scores = _scores(block, query, key)
        lse = scores.logsumexp(-1)
        output = (scores - lse[..., None]).exp().to(value.dtype) @ value
    return output[0].transpose(0, 1)[..., : block.value_dim], lse[0].transpose(0, 1).float()


def block_backward(
    block: Block, grad_QHD: torch.Tensor, output_QHD: torch.Tensor, lse_QH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients in float32 of the queries [Q, H, D], and of keys and values side by side [F, K, E].

    Args:
        block: What the forward pass was given.
        grad_QHD: Gradient of the output of the whole softmax.
        output_QHD: That output.
        lse_QH: Its log-sum-exp, float32.
    """
    query, key, value = block.parts
    if not query.shape[2]:
        return torch.zeros_like(block.query_QHD).float(), torch.zeros_like(block.both_FKE).float()
    padding = query.shape[-1] - block.value_dim
    grad, output = (F.pad(row, (0, padding)).transpose(0, 1)[None].contiguous() for row in (grad_QHD, output_QHD))
    lse = lse_QH.transpose(0, 1)[None].contiguous()
    grads = _kernel_backward(block, (grad, query, key, value, output, lse))
    query_grad, key_grad, value_grad = (part[0].transpose(0, 1).float() for part in grads)
    both = torch.cat((key_grad, value_grad[..., : block.value_dim]), dim=-1)
    return query_grad, torch.unflatten(both, 1, (block.both_FKE.shape[1], -1)).sum(2)


def _kernel_backward(block: Block, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    grad, query, key, value, output, lse = tensors
    kernel = kernel_of(query)
    if kernel == "cpu":
        return tuple(
            aten._scaled_dot_product_flash_attention_for_cpu_backward(  # noqa: SLF001 - see the forward
                *tensors, 0.0, block.is_causal, scale=block.scale
            )
        )
    if kernel == "cuda":
        # Without dropout its random state is not read.
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)
        return tuple(
            aten._scaled_dot_product_flash_attention_backward(  # noqa: SLF001 - see the forward
                *tensors,
                None,
                None,
                query.shape[2],
                key.shape[2],
                0.0,
                block.is_causal,
                state,
                state[:0],
                scale=block.scale,
            )
        )
    weights = (_scores(block, query, key) - lse[..., None]).exp()
    grad, output, value = grad.float(), output.float(), value.float()
    grad_scores = weights * (grad @ value.mT - (grad * output).sum(-1, keepdim=True)) * block.scale
    return grad_scores @ key.float(), grad_scores.mT @ query.float(), weights.mT @ grad


def _scores(block: Block, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    scores = (query @ key.mT).float() * block.scale
    if block.is_causal:
        ones = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        scores = scores.masked_fill(~ones.tril(), -torch.inf)
    return scores
