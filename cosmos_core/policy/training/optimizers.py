"""Optimizers by name, and the learning rate of each step.

Muon orthogonalises whole matrices. Of sharded ones each process of the longest axis of their mesh gathers all and
orthogonalises its share; the others get the result from it. As every process gathers every matrix, an axis of P brings
P times the bytes, in bfloat16, that gathering each at its owner alone would.

Source: arXiv:1711.05101 (AdamW); arXiv:2110.02861 (its moments in 8 bits); arXiv:2502.16982 section 2.2 (Muon, updates
as large as AdamW's). Deviation: experts, which are stacks of matrices, learn by AdamW.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim._muon import (  # torch's Muon, which takes whole matrices
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    DEFAULT_NS_STEPS,
    EPS,
    _adjust_lr,
    _zeropower_via_newtonschulz,
)

from cosmos_core.config.schema import OptimizerConfig
from cosmos_core.policy.training.gradients import local, stored
from cosmos_core.weights.shards import local_shard

_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
_MOMENTUM: Final = "momentum_buffer"

Kind: TypeAlias = Callable[[Sequence[torch.Tensor], OptimizerConfig], torch.optim.Optimizer]


class Optimizer:
    """Updates the trainable parameters of a module in place; its state is there from the start, by parameter name.

    Args:
        module: Its gradients are those that `step` applies.
        config: Kind and constants; learning rate and weight decay are given at each step.
    """

    def __init__(self, module: torch.nn.Module, config: OptimizerConfig) -> None:
        self._named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        parts: dict[Kind, list[torch.Tensor]] = defaultdict(list)
        for name, parameter in self._named.items():
            parts[_Muon if config.kind == "muon" and is_hidden(name, parameter) else _adamw].append(parameter)
        self._optimizers = [kind(parameters, config) for kind, parameters in parts.items()]

    def step(self, lr: float, weight_decay: float) -> None:
        """Apply the gradients that the parameters hold; of Muon, all processes of a replica do."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                # torchao's is a tensor, as it compiles its step.
                group["lr"] = group["lr"].fill_(lr) if isinstance(group["lr"], torch.Tensor) else lr
                group["weight_decay"] = weight_decay
            optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        """The state as `<parameter>.<key>` -> tensor, in a fixed order; no copies, so writing into it changes it.

        Of tensors in 8 bits a copy has the values, and writing quantises; see `gradients.stored`.
        """
        states = {parameter: each for part in self._optimizers for parameter, each in part.state.items()}
        return {
            f"{name}.{key}": tensor
            for name, parameter in self._named.items()
            for key, tensor in states[parameter].items()
        }

    def held(self) -> list[torch.Tensor]:
        """The tensors that the state is stored in."""
        return [piece for tensor in self.state().values() for piece in stored(tensor)]


def is_hidden(name: str, parameter: torch.Tensor) -> bool:
    """True of the matrices of numbered layers, which Muon trains: not of embeddings, the output layer and vectors."""
    return parameter.dim() == 2 and any(part.isdecimal() for part in name.split("."))


def _adamw(parameters: Sequence[torch.Tensor], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Fused AdamW, moments in float32; or torchao's, in 8 bits with a scale for each 256, but for what is small."""
    constants: Any = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if config.kind == "adamw-8bit":
        from torchao.optim import AdamW8bit  # noqa: PLC0415 - an extra, which this kind alone needs

        made = AdamW8bit(parameters, **constants)
        if all(each.device.type != "cuda" for each in parameters):
            # Compiled on a CPU, it wants a C++ compiler, and half a minute for each shape.
            made.step = functools.partial(_uncompiled, made.step)
    else:
        made = torch.optim.AdamW(parameters, **constants, fused=True)
    # They fill the state at the first step; filled here, a checkpoint or a joining replica finds it before that.
    for each in parameters:
        count = torch.zeros((), dtype=torch.float32, device=each.device)
        new: Any = getattr(made, "_new_buffer", lambda parameter, _: torch.zeros_like(parameter))
        made.state[each] = {"step": count, **{key: new(each, key == _MOMENTS[0]) for key in _MOMENTS}}
    optimizer: torch.optim.Optimizer = made
    return optimizer


def _uncompiled(step: Callable[[], object]) -> None:
    with torch.compiler.set_stance("force_eager"):
        step()


class _Muon(torch.optim.Optimizer):
    """torch's Muon, bit for bit, on matrices of which each process may have a shard."""

    def __init__(self, parameters: Sequence[torch.Tensor], config: OptimizerConfig) -> None:
        super().__init__(parameters, {"lr": config.lr, "weight_decay": config.weight_decay})
        self._momentum: Final = config.momentum
        for each in parameters:
            self.state[each] = {_MOMENTUM: torch.zeros_like(each)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002 - torch's signature
        """Apply the gradients."""
        (group,) = self.param_groups
        spread: dict[DeviceMesh | None, list[torch.Tensor]] = defaultdict(list)
        for parameter in group["params"]:
            spread[getattr(parameter, "device_mesh", None)].append(parameter)
        for mesh, parameters in spread.items():
            axis = 0 if mesh is None else max(range(mesh.ndim), key=mesh.size)
            count = 1 if mesh is None else mesh.size(axis)
            for begin in range(0, len(parameters), count):
                self._update(parameters[begin : begin + count], mesh, axis, group)

    def _update(
        self, parameters: Sequence[torch.Tensor], mesh: DeviceMesh | None, axis: int, group: Mapping[str, Any]
    ) -> None:
        """Update as many matrices as there are processes along an axis; each of these orthogonalises one."""
        place = 0 if mesh is None else mesh.get_local_rank(axis)
        results: list[torch.Tensor] = []
        for owner, parameter in enumerate(parameters):
            result = self._gathered(parameter)
            if owner == place:
                coefficients = DEFAULT_A, DEFAULT_B, DEFAULT_C
                result = _zeropower_via_newtonschulz(result, coefficients, DEFAULT_NS_STEPS, EPS).contiguous()
            # Of those of others no memory is kept until they come.
            results.append(result if owner == place else result.new_empty(0))
        for owner, (parameter, own) in enumerate(zip(parameters, results, strict=True)):
            result = own if owner == place else own.new_empty(parameter.shape)
            if mesh is not None:
                dist.broadcast(result, group=mesh.get_group(axis), group_src=owner)
            lr, share = group["lr"], local_shard(parameter)
            share.tensor.mul_(1 - lr * group["weight_decay"])
            share.tensor.add_(
                result[share.index].to(share.tensor.device), alpha=-_adjust_lr(lr, "match_rms_adamw", parameter.shape)
            )

    def _gathered(self, parameter: torch.Tensor) -> torch.Tensor:
        """The whole update before it is orthogonalised, in the bfloat16 in which that is done."""
        assert parameter.grad is not None, "gradients are assigned before the backward pass"
        grad, momentum = local(parameter.grad), local(self.state[parameter][_MOMENTUM])
        momentum.lerp_(grad, 1 - self._momentum)
        update = grad.lerp(momentum, self._momentum).bfloat16()
        if not isinstance(parameter, DTensor):
            return update
        # It moves what is kept in the CPU's memory to the accelerator.
        shape, stride = parameter.shape, parameter.stride()
        spread = DTensor.from_local(
            update, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
        )
        whole: torch.Tensor = spread.full_tensor()
        return whole


def learning_rate(config: OptimizerConfig, *, step: int, steps: int) -> float:
    """The learning rate of one optimizer step.

    Warm-up step k of W has k / W of the peak. After it, `constant` stays at the peak; `linear` and `cosine` reach
    `final_lr_ratio` of it at the last step.

    Args:
        config: The stage's optimizer.
        step: Step of the stage, from 1.
        steps: Steps of the stage.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, steps - config.warmup_steps))
    shape = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.final_lr_ratio + (1.0 - config.final_lr_ratio) * shape)
