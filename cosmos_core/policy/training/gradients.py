"""Gradients: one buffer for all of a process, and those of parameters that a pipeline holds twice."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from cosmos_core.errors import TrainingError
from cosmos_core.policy.processes.world import World

_SQUARED_AT_ONCE: Final = 1 << 22
"""Elements of the buffer whose norm is taken at a time: torch makes a float64 copy of them."""


class GradientBuffer:
    """Owns the `.grad` of each trainable parameter as a view of one buffer of their dtype; of a shard, the local part.

    Parameters that a batch does not touch have a gradient of zero, never None, so that a step on any share of a batch
    updates the same tensors.

    Args:
        parameters: By name.
        processes: Processes that together hold each parameter once: those of one pipeline stage.
        twice: Names of parameters that another stage holds, too: each counts half in the norm.

    Raises:
        TrainingError: Trainable parameters are not all float32, nor all float64.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], *, processes: int = 1, twice: Sequence[str] = ()
    ) -> None:
        self._parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        locals_ = [local(parameter) for parameter in self._parameters.values()]
        sizes = [tensor.numel() for tensor in locals_]
        # A stage of a pipeline may have nothing to train; its buffer is where those that it is reduced with are.
        device = next((parameter.device for parameter in parameters.values()), torch.device("cpu"))
        self.flat = torch.zeros(sum(sizes), dtype=self._dtype(), device=device)
        self._views = [
            part.view(tensor.shape) for part, tensor in zip(torch.split(self.flat, sizes), locals_, strict=True)
        ]
        self._copies = [
            num_copies(parameter, processes) * (2 if name in twice else 1)
            for name, parameter in self._parameters.items()
        ]
        self.zero()

    def _dtype(self) -> torch.dtype:
        dtypes = {parameter.dtype for parameter in self._parameters.values()} or {torch.float32}
        if dtypes not in ({torch.float32}, {torch.float64}):
            said = ", ".join(sorted(map(str, dtypes)))
            raise TrainingError(f"parameters of {said}: gradients are added up in the float32 of all that is trained")
        return dtypes.pop()

    def zero(self) -> None:
        """Forget what was accumulated."""
        self.flat.zero_()
        for parameter, view in zip(self._parameters.values(), self._views, strict=True):
            parameter.grad = _like(parameter, view)

    def collect(self) -> None:
        """Bring into the buffer what autograd put elsewhere instead of adding to it."""
        for parameter, view in zip(self._parameters.values(), self._views, strict=True):
            grad = parameter.grad
            assert grad is not None, "gradients are assigned before the backward pass"
            part = local(grad)
            if part.data_ptr() != view.data_ptr():
                view.copy_(part)
                parameter.grad = _like(parameter, view)

    def sum(self, group: dist.ProcessGroup) -> None:
        """Add up over processes that hold the same parameters and see other sequences; all of them call it."""
        dist.all_reduce(self.flat, group=group)

    def of(self, name: str) -> torch.Tensor:
        """The part of the buffer that is the gradient of a parameter."""
        return self._views[list(self._parameters).index(name)]

    def square(self) -> torch.Tensor:
        """This process's part of the squared norm, float64 []: over all processes of a replica they add up to it."""
        sums = torch.zeros((), dtype=torch.float64, device=self.flat.device)
        for copies, run in self._runs():
            for part in torch.split(run, _SQUARED_AT_ONCE):
                sums += torch.linalg.vector_norm(part, dtype=torch.float64).square() / copies
        return sums

    def clip(self, norm: float, limit: float) -> None:
        """Scale to at most `limit`, given the present norm; 0 does not clip."""
        if limit > 0.0 and norm > limit:
            self.flat.mul_(limit / (norm + 1e-6))

    def _runs(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Neighbouring parameters of which there are as many copies, as one part of the buffer."""
        start = end = copies = 0
        for view, number in zip(self._views, self._copies, strict=True):
            if number != copies and end > start:
                yield copies, self.flat[start:end]
                start = end
            copies, end = number, end + view.numel()
        if end > start:
            yield copies, self.flat[start:end]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process holds."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def stored(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that this process's part is stored in: itself, or the codes and scales of one in few bits."""
    part: Any = local(tensor)
    is_plain = type(part) is torch.Tensor
    return [part] if is_plain else [getattr(part, name) for name in part.__tensor_flatten__()[0]]


def num_copies(parameter: torch.Tensor, processes: int) -> int:
    """The number of `processes` that hold the same elements."""
    if not isinstance(parameter, DTensor):
        return processes
    mesh = parameter.device_mesh
    parts = [mesh.size(dim) for dim, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    return processes // math.prod(parts)


def _like(parameter: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return view
    # As FSDP makes its own: `from_local` would move what is kept in the CPU's memory to the accelerator.
    return DTensor(view, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]  # noqa: SLF001


class TiedParameters:
    """Parameters that a pipeline holds twice: a tied embedding, which enters the first stage and leaves from the last.

    Each of the two processes has a copy of its own and a gradient of its own; their sum is the parameter's. Both then
    take the same optimizer step, so the copies stay equal. Every process of the replica makes one.

    Args:
        module: The stages of this process.
        world: The processes of the replica.

    Attributes:
        partners: For each such parameter, in the order of names, the other holder's place in the pipeline.
    """

    def __init__(self, module: torch.nn.Module, world: World) -> None:
        self._mesh: Final = world.mesh
        self.partners: Mapping[str, int] = {}
        if world.mesh.size("pp") == 1:
            return
        here = world.mesh.place("pp")
        own = [here, [name for name, each in module.named_parameters() if each.requires_grad]]
        holders: dict[str, set[int]] = defaultdict(set)
        for place, names in map(json.loads, world.exchange(json.dumps(own).encode())):
            for name in names:
                holders[name].add(place)
        self.partners = {
            name: next(iter(places - {here}))
            for name, places in sorted(holders.items())
            if here in places and len(places) > 1
        }

    def sum(self, gradients: GradientBuffer) -> None:
        """Add to each gradient that of the other holder."""
        for name, place in self.partners.items():
            group = self._mesh.group("pp")
            peer = dist.get_global_rank(group, place)
            own = gradients.of(name)
            other = torch.empty_like(own)
            both = [dist.P2POp(dist.isend, own, peer, group), dist.P2POp(dist.irecv, other, peer, group)]
            for request in dist.batch_isend_irecv(both):
                request.wait()
            own += other
