"""Parts along any dimension are joined in order, and sums are cut in order, whatever lies outside the dimension."""

import torch
import torch.distributed as dist

from cosmos_core.models.parallel.collectives import gather_dim, reduce_scatter_dim
from cosmos_core.testing.worlds import run_world

SHAPES = (((4, 3), 0), ((1, 4, 3), 1), ((2, 4, 3), 1), ((1, 1, 6), 2), ((3, 4), 1))


def whole(shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def gathered_and_scattered():
    group, results = dist.group.WORLD, []
    for shape, dim in SHAPES:
        own = whole(shape).chunk(2, dim)[dist.get_rank()].requires_grad_()
        joined = gather_dim(own, dim, group)
        (joined * whole(shape)).sum().backward()
        results.append((joined.detach(), own.grad, reduce_scatter_dim(whole(shape), dim, group)))
    return results


def test_parts_are_joined_and_sums_are_cut():
    for rank, results in enumerate(run_world(2, gathered_and_scattered)):
        for (shape, dim), (joined, grad, scattered) in zip(SHAPES, results, strict=True):
            torch.testing.assert_close(joined, whole(shape))
            part = 2 * whole(shape).chunk(2, dim)[rank]
            torch.testing.assert_close(grad, part)
            torch.testing.assert_close(scattered, part)
