"""Routing of one forward, and the hooks by which it reaches routers.

A `Routing` travels as a keyword through the module to every layer, as the packing does: the recompute of activation
checkpointing brings it back too, and two micro-batches in a pipeline never mix. A hook on each layer hands it to the
layer's router, and a hook on the router acts on it. Modules without hooks ignore the keyword.

The gradient of a loss is put in where the loss arises: the last stage of a pipeline need not know of it.

Shape legend: U units that a router sees, E experts, K experts of a unit, L layers of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import attrs
import torch

from cosmos_core.errors import ConfigError, PluginIncompatibleError
from cosmos_model_moe import balance
from cosmos_model_moe.gating import Gating
from cosmos_model_moe.options import MixtureOptions

KEYWORD: Final = "routing"
NO_CHOICE: Final = -1


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@attrs.frozen(kw_only=True, eq=False)
class Routing:
    """One forward, as its routers see it.

    Attributes:
        sequence_U: int64, the document of each unit; padding is the last.
        weights_S: float32, each document's part of the batch's loss (0 for padding); None where nothing is learned
            from this forward, so that it has no losses and counts for no load.
        choices_ULK: int64, the experts that the rollout used in each layer, `NO_CHOICE` where none is recorded; None
            where the routers choose.
        total: Sums a tensor over the processes that hold the other units of the row (`cp`), without gradient.
        counted: Routers that have counted this forward's load: a recompute does not count again.
    """

    sequence_U: torch.Tensor
    weights_S: torch.Tensor | None = None
    choices_ULK: torch.Tensor | None = None
    total: Callable[[torch.Tensor], torch.Tensor] = _alone
    counted: set[int] = attrs.field(factory=set)


class Watch:
    """State of a hooked router: its place in the model, this forward's routing, and the step's load.

    Attributes:
        layer: Index of its layer in the whole model.
        routing: Of the forward that is under way.
        load_E: float32, uses of each expert by what this process learned from since the last `zero_`.
    """

    def __init__(self, layer: int, num_experts: int, device: torch.device) -> None:
        self.layer = layer
        self.routing: Routing | None = None
        self.load_E = torch.zeros(num_experts, device=device)


def routers(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The routers of a module with the names of the layers that hold them (`model.layers.3`)."""
    for name, child in module.named_modules():
        layer, is_gate, rest = name.rpartition(".mlp.gate")
        if is_gate and not rest and hasattr(child, "top_k"):
            yield layer, child


def install(module: torch.nn.Module, gating: Gating, options: MixtureOptions) -> Mapping[str, Watch]:
    """Hook each router of a module, and the layer that holds it; the watches by layer."""
    watches = {}
    for layer, router in routers(module):
        num_experts, _ = router.weight.shape  # type: ignore[misc]
        watch = Watch(int(layer.rpartition(".")[2]), num_experts, next(router.parameters()).device)
        module.get_submodule(layer).register_forward_pre_hook(_hand_over(watch), with_kwargs=True)
        router.register_forward_hook(_act(watch, gating, options))
        watches[layer] = watch
    return watches


def record(module: torch.nn.Module, num_layers: int) -> Callable[[], torch.Tensor]:
    """Note what each router of a module chooses.

    Args:
        module: The whole model.
        num_layers: L.

    Returns:
        What was chosen in the newest forward, int16 [U, L, K]; layers without experts hold `NO_CHOICE`.

    Raises:
        ConfigError: No layer has experts.
    """
    chosen: dict[int, torch.Tensor] = {}
    found = list(routers(module))
    if not found:
        raise ConfigError(
            f"model.options.router_replay: none of the {num_layers} layers of this {type(module).__name__} has "
            "experts, so there is nothing to replay; leave the option out"
        )
    for layer, router in found:
        router.register_forward_hook(_note(chosen, int(layer.rpartition(".")[2])))

    def newest() -> torch.Tensor:
        none_UK = torch.full_like(next(iter(chosen.values())), NO_CHOICE)
        return torch.stack([chosen.get(layer, none_UK) for layer in range(num_layers)], dim=1)

    return newest


def _note(chosen: dict[int, torch.Tensor], layer: int) -> Callable[..., None]:
    def hook(
        router: torch.nn.Module,  # noqa: ARG001
        args: tuple[Any, ...],  # noqa: ARG001
        output: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        chosen[layer] = output[2].to(torch.int16)

    return hook


def _hand_over(watch: Watch) -> Callable[..., None]:
    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:  # noqa: ARG001
        watch.routing = kwargs.get(KEYWORD)

    return hook


def _act(watch: Watch, gating: Gating, options: MixtureOptions) -> Callable[..., tuple[torch.Tensor, ...] | None]:
    def hook(
        router: torch.nn.Module,
        args: tuple[Any, ...],  # noqa: ARG001
        output: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        routing = watch.routing
        if routing is None:
            return None
        logits_UE, weights_UK, experts_UK = output
        _check_units(router, logits_UE, routing)
        if routing.choices_ULK is not None:
            recorded_UK = routing.choices_ULK[:, watch.layer]
            experts_UK = torch.where(recorded_UK == NO_CHOICE, experts_UK, recorded_UK)
            weights_UK = gating.weights(router, logits_UE, experts_UK)
        if routing.weights_S is not None and torch.is_grad_enabled():
            _count(watch, routing, experts_UK)
            weights_UK = _penalise(weights_UK, logits_UE, experts_UK, gating=gating, options=options, routing=routing)
        return logits_UE, weights_UK, experts_UK

    return hook


def _check_units(router: torch.nn.Module, logits_UE: torch.Tensor, routing: Routing) -> None:
    if logits_UE.shape[0] != routing.sequence_U.shape[0]:
        raise PluginIncompatibleError(
            f"{type(router).__name__} sees {logits_UE.shape[0]} units of a row of {routing.sequence_U.shape[0]}: "
            "balancing and replay need the units of its whole row; set policy.parallel.sequence_parallel = false"
        )


def _count(watch: Watch, routing: Routing, experts_UK: torch.Tensor) -> None:
    if watch.layer in routing.counted:
        return
    routing.counted.add(watch.layer)
    assert routing.weights_S is not None
    is_learned_U = routing.weights_S.ne(0)[routing.sequence_U]
    watch.load_E += balance.load_of(experts_UK[is_learned_U], len(watch.load_E))


def _penalise(
    weights_UK: torch.Tensor,
    logits_UE: torch.Tensor,
    experts_UK: torch.Tensor,
    *,
    gating: Gating,
    options: MixtureOptions,
    routing: Routing,
) -> torch.Tensor:
    assert routing.weights_S is not None
    S = len(routing.weights_S)
    loss_S = torch.zeros_like(routing.weights_S)
    if options.auxiliary_loss > 0:
        loss_S = loss_S + options.auxiliary_loss * balance.sequence_balance(
            gating.probabilities(logits_UE),
            experts_UK,
            routing.sequence_U,
            S,
            counts_per_choice=gating.counts_per_choice,
            total=routing.total,
        )
    if options.z_loss > 0:
        loss_S = loss_S + options.z_loss * balance.sequence_z(logits_UE, routing.sequence_U, S, total=routing.total)
    return _Penalised.apply(weights_UK, loss_S @ routing.weights_S) if loss_S.requires_grad else weights_UK  # type: ignore[no-untyped-call]


class _Penalised(torch.autograd.Function):
    """A tensor as it is; its backward pass gives the penalty beside it the gradient of a term of the loss."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(True)
        ctx.penalty_dtype, ctx.penalty_device = penalty.dtype, penalty.device
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, torch.ones((), dtype=ctx.penalty_dtype, device=ctx.penalty_device)
