"""Lays a Hugging Face module, or a pipeline stage of one, over the processes of a mesh.

The order matters. Attention over `cp` comes first, as it changes nothing that has a name. What linear layers compute
(in 8 bits, with adapters) lies innermost: it works on the part that a process has of one. Tensor parallelism makes
parameters DTensors, then adapters get theirs; the sequence is split round what it left; experts leave their modules
for `ep`. Compiling sees the result, and recomputing wraps all of it, so that its collectives run again too. Sharding is
last: it gathers what the others split.

Sequence parallelism: between blocks, each process of `tp` holds its part of the sequence. A decoder layer's children
with submodules are its blocks (attention, MLP); children without are norms and other maps of one position, which work
on a part of the sequence: only their parameters' gradients have to be summed. A block sees the whole sequence. Where
all of it is tensor parallel, the gather before it sums gradients and its result is scattered (*gathered* block);
otherwise it runs whole on each process, and its result is split.

Sharded data parallelism: weights are spread over the processes that see different data, and gathered layer by layer.
Losses are weighted over the whole batch, so gradients are sums over processes, never means. They are reduced in float32
at least. Those of `dp_replicate` are summed by the trainer, once a step.

Source: arXiv:2304.11277 (`torch.distributed.fsdp.fully_shard`); arXiv:2205.05198 section 4.2.2. Deviation: blocks that
are not tensor parallel throughout, such as experts and their router, keep the all-reduce inside.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from cosmos_core.errors import ConfigError, PluginIncompatibleError, UnevenError
from cosmos_core.models.attention import context
from cosmos_core.models.head import Vocabulary, note_part
from cosmos_core.models.parallel.collectives import gather_dim, gather_for_shared, split_dim
from cosmos_core.models.parallel.compiled import economise
from cosmos_core.models.parallel.expert import is_experts, spread_experts
from cosmos_core.models.parallel.float8 import install_float8
from cosmos_core.models.parallel.forwards import change_hidden, own_parameters, recompute_layer, root
from cosmos_core.models.parallel.lora import add_adapters, surround_adapted
from cosmos_core.models.parallel.offload import offload
from cosmos_core.models.parallel.plan import KEYS_AND_VALUES, QUERIES, ParallelPlan, head_width
from cosmos_core.models.parallel.stages import Anatomy
from cosmos_core.models.parallel.tensor import (
    SPLIT_STYLES,
    Style,
    Tensor,
    apply_style,
    own_part,
    sum_parameter_gradients,
)
from cosmos_core.protocols import Layout

CPU: Final = torch.device("cpu")
SEQUENCE: int = 1
"""The sequence's dimension of [B, S, D]."""

Styles: TypeAlias = dict[nn.Module, Style]

HEAD_COUNTS: Final = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads")


def parallelize(module: PreTrainedModel, layout: Layout, plan: ParallelPlan, device: torch.device = CPU) -> None:
    """Split a module's parameters and change its forwards, in place, for weights that will be on a device.

    Raises:
        ConfigError: A number of the model does not fit the mesh.
        PluginIncompatibleError: The model does what this layout cannot.
    """
    anatomy = Anatomy.of(module)
    if anatomy is None:
        raise PluginIncompatibleError(
            f"{type(module).__name__} has no list of its layers, so it cannot be laid over several processes"
        )
    layers = {f"{anatomy.name}.{i}": each for i, each in enumerate(anatomy.layers) if _has_parameters(each)}
    mesh = layout.mesh
    context.install(module, layout)
    install_float8(module, layout, device)
    adapted = surround_adapted(layers, layout)
    if mesh.size("tp") > 1:
        _split_tensors(module, layers, layout, plan)
    add_adapters(module, adapted, layout)
    experts = _spread(layers, layout) if mesh.size("ep") > 1 else []
    if layout.compile:
        for each in experts:
            # Rows travel in numbers that differ each time, which a compiled graph would be made anew for.
            each.forward = torch.compiler.disable(each.forward)  # type: ignore[no-untyped-call]
    for layer in layers.values():
        economise(layer, layout)
    if layout.offload_activations:
        offload([*layers.values()])
    # Layers of towers beside the text decoder may keep more than all of that does.
    text = set(module.get_decoder().modules())
    towers = [each for each in module.modules() if isinstance(each, GradientCheckpointingLayer) and each not in text]
    for tower in towers:
        recompute_layer(tower, layout.recompute)
    if mesh.size("tp") > 1 and layout.sequence_parallel:
        # Round what is compiled, so that the first and the last layer are like all others there.
        _split_sequence(list(layers.values()), mesh.group("tp"))
    root(module, layout, _beside(module))
    shard(module, list(layers.values()), experts, _lone_embedding(module), layout)


def _split_tensors(module: PreTrainedModel, layers: dict[str, nn.Module], layout: Layout, plan: ParallelPlan) -> None:
    mesh = layout.mesh.axis("tp")
    config = module.config.get_text_config()
    rope_dim = getattr(config, "qk_rope_head_dim", None) or 0
    gathered: set[nn.Module] = set()
    for name, layer in layers.items():
        sizes = _head_sizes(layer, config)
        styles = {
            child: _style(f"{name}.{part}", child, mesh.size(), plan, sizes) for part, child in layer.named_modules()
        }
        _localize_heads(layer, name, styles, config, mesh.size())
        blocks = [child for child in layer.children() if layout.sequence_parallel and _is_split(child, styles)]
        inside = {child for block in blocks for child in block.modules()}
        for part, child in layer.named_modules():
            is_gathered, head_size = child in inside, sizes.get(child)
            axis = Tensor(mesh=mesh, rope_dim=rope_dim, is_gathered=is_gathered, head_size=head_size)
            apply_style(child, f"{name}.{part}", styles[child], axis)
        for block in blocks:
            if styles[block] != "rowwise":
                # Its gradient is partial.
                change_hidden(block, before=lambda hidden: gather_dim(hidden, hidden.dim() - 2, mesh.get_group()))
        gathered.update(blocks)
    _split_vocabulary(module, Tensor(mesh=mesh, rope_dim=rope_dim))
    if layout.sequence_parallel:
        _split_layers(list(layers.values()), gathered, mesh.get_group())


def _style(name: str, module: nn.Module, size: int, plan: ParallelPlan, head_sizes: Mapping[nn.Module, int]) -> Style:
    """The plan's style, refined by what the axis divides."""
    if any(plan.style_of(f"{name}.{key}") == "heads" for key in own_parameters(module)):
        return "heads"
    style = plan.style_of(name)
    if style == "colwise" and name.rpartition(".")[2] in KEYS_AND_VALUES:
        rows, length = own_parameters(module)["weight"].shape[0], head_sizes[module]
        if rows % length:
            raise ConfigError(f"policy.mesh.tp: the {rows} rows of {name} are no whole number of heads of {length}")
        return "kv_heads" if rows // length % size else "colwise"
    return style


def shared_heads(module: PreTrainedModel, plan: ParallelPlan) -> Mapping[str, int]:
    """The number of heads of each parameter that `tp` splits only if it divides them."""
    anatomy = Anatomy.of(module)
    found: dict[str, int] = {}
    if anatomy is None:
        return found
    for index, layer in enumerate(anatomy.layers):
        sizes = _head_sizes(layer, module.config.get_text_config())
        for part, child in layer.named_modules():
            name = f"{anatomy.name}.{index}.{part}"
            if plan.style_of(name) == "colwise" and part.rpartition(".")[2] in KEYS_AND_VALUES:
                own = own_parameters(child)
                found |= {f"{name}.{key}": own["weight"].shape[0] // sizes[child] for key in own}
    return found


def _head_sizes(layer: nn.Module, config: PretrainedConfig) -> dict[nn.Module, int]:
    """The number of rows that make a head, for each projection of keys or values."""
    default = head_width(config)
    found: dict[nn.Module, int] = {}
    for attention in layer.modules():
        size = getattr(attention, "head_dim", None)
        held = [child for key, child in attention.named_children() if key in KEYS_AND_VALUES]
        if (width := size if isinstance(size, int) else default) is not None:
            found |= dict.fromkeys(held, width)
    return found


def _localize_heads(layer: nn.Module, name: str, styles: Styles, config: PretrainedConfig, size: int) -> None:
    """Tell attention modules how many heads they have here."""
    for part, attention in layer.named_modules():
        children = dict(attention.named_children())
        if not any(key in QUERIES and styles[child] == "colwise" for key, child in children.items()):
            continue
        if config.num_attention_heads % size:
            raise UnevenError(
                f"policy.mesh.tp: {size} does not divide the {config.num_attention_heads} heads of {name}.{part}"
            )
        for key in HEAD_COUNTS:
            if isinstance(getattr(attention, key, None), int):
                setattr(attention, key, max(1, getattr(attention, key) // size))
        if any(styles[child] == "kv_heads" for child in children.values()):
            attention.num_key_value_groups = config.num_attention_heads // size


def _is_split(block: nn.Module, styles: Styles) -> bool:
    """Tell whether all parameters of a block are split in a way that lets its input be gathered for all of them."""
    holders = [child for child in block.modules() if own_parameters(child)]
    found = {styles[child] for child in holders}
    return bool(found & {"colwise", "rowwise"}) and found <= SPLIT_STYLES


def _split_vocabulary(module: PreTrainedModel, axis: Tensor) -> None:
    """The embedding by rows and the output layer by columns; the last process may have fewer tokens."""
    embedding, output = module.get_input_embeddings(), module.get_output_embeddings()
    is_tied = embedding is not None and output is not None and embedding.weight is output.weight
    if isinstance(embedding, nn.Embedding):
        apply_style(embedding, "the embedding", "embedding_rowwise", axis)
        if is_tied:
            output.weight = embedding.weight
    if isinstance(output, nn.Linear):
        own = own_part(output.out_features, axis.mesh)
        apply_style(output, "the output layer", "vocabulary", axis)
        most = math.ceil(output.out_features / axis.size)
        note_part(output, Vocabulary(start=own.start, size=len(own), most=most, group=axis.group))


def _spread(layers: Mapping[str, nn.Module], layout: Layout) -> list[nn.Module]:
    """The experts modules, spread over `ep`; a pipeline stage may have none."""
    group = layout.mesh.group("tp") if layout.mesh.size("tp") > 1 else None
    inside = [(f"{name}.{part}", child) for name, layer in layers.items() for part, child in layer.named_modules()]
    found = {name: child for name, child in inside if is_experts(child)}
    for name, child in found.items():
        spread_experts(child, name, layout.mesh.axis("ep"), group)
    return list(found.values())


def _lone_embedding(module: PreTrainedModel) -> nn.Module | None:
    embedding: nn.Module | None = module.get_input_embeddings()
    output = module.get_output_embeddings()
    if embedding is None or not _has_parameters(embedding):
        return None
    return None if output is not None and output.weight is embedding.weight else embedding


def _beside(module: PreTrainedModel) -> list[nn.Module]:
    """Modules with weights beside the decoder and the output layer, such as a vision tower."""
    used = {module.get_decoder(), module.get_output_embeddings(), module.get_input_embeddings()}
    outer = [each for each in module.modules() if any(part in used for part in each.modules())]
    return [child for parent in outer if parent not in used for child in parent.children() if child not in outer]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _split_layers(layers: Sequence[nn.Module], gathered: Collection[nn.Module], group: dist.ProcessGroup) -> None:
    """Let layers work on a part of the sequence; styles are applied already.

    `gathered` are the children of layers that are tensor parallel throughout.
    """
    for layer in layers:
        for name, child in layer.named_children():
            if child not in gathered:
                _split_child(f"{type(layer).__name__}.{name}", child, group)
        if own_parameters(layer):
            sum_parameter_gradients(layer, group)


def _split_sequence(layers: Sequence[nn.Module], group: dist.ProcessGroup) -> None:
    """Split the sequence before the first layer, and gather it after the last one."""
    if layers:
        change_hidden(layers[0], before=lambda hidden: _split(hidden, group))
        change_hidden(layers[-1], after=lambda hidden: gather_for_shared(hidden, SEQUENCE, group))


def _split_child(name: str, child: nn.Module, group: dist.ProcessGroup) -> None:
    if next(child.children(), None) is not None:
        change_hidden(
            child,
            before=lambda hidden: gather_for_shared(hidden, SEQUENCE, group),
            after=lambda result: split_dim(result, result.dim() - 2, group),
        )
    elif own_parameters(child):
        if type(child).__name__.startswith("Conv") and not type(child).__name__ == "Conv1D":
            raise PluginIncompatibleError(
                f"{name} mixes positions, which sequence parallelism does not split: set "
                "policy.parallel.sequence_parallel = false"
            )
        sum_parameter_gradients(child, group)


def _split(hidden: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    if hidden.dim() != 3 or hidden.shape[SEQUENCE] % group.size():
        raise PluginIncompatibleError(
            f"hidden states of shape {tuple(hidden.shape)} cannot be split into {group.size()} parts of the sequence: "
            "pad the row, or set policy.parallel.sequence_parallel = false"
        )
    return split_dim(hidden, SEQUENCE, group)


def shard(
    root: nn.Module,
    layers: Sequence[nn.Module],
    experts: Sequence[nn.Module],
    embedding: nn.Module | None,
    layout: Layout,
) -> None:
    """Shard a module: experts, each layer, the embedding, and the rest as one, which is gathered throughout.

    The embedding is None where it shares weights with another module. A ConfigError says that weights shall stay in CPU
    memory, and there is no accelerator.
    """
    if layout.mesh.world_size == 1:
        if layout.cpu_offload:
            raise ConfigError("policy.parallel.cpu_offload: it is FSDP's, which a replica of one process does without")
        return
    mesh = layout.mesh.weights
    if layout.cpu_offload and mesh.device_type == "cpu":
        raise ConfigError(
            "policy.parallel.cpu_offload: weights are in CPU memory already; it is for policy.device = 'cuda'"
        )
    precision = getattr(torch, layout.micro_batch_precision)
    options: dict[str, Any] = {
        "reshard_after_forward": layout.reshard_after_forward,
        # Layers get inputs as transformers makes them: some are float32 on purpose, such as routing weights.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=None if precision == torch.float32 else precision,
            reduce_dtype=torch.promote_types(precision, torch.float32),
            cast_forward_inputs=False,
        ),
        **({"offload_policy": CPUOffloadPolicy()} if layout.cpu_offload else {}),
    }
    for module in experts:
        fully_shard(module, mesh=layout.mesh.expert_weights, **options)
    for module in (*layers, *(() if embedding is None else (embedding,)), root):
        fully_shard(module, mesh=mesh, **options)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
