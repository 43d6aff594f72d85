"""Facts of a Hugging Face model for planning: from its config, on tensors without storage."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, overload

import attrs
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from cosmos_core.errors import ConfigError
from cosmos_core.models.activations import AFTER_LAYERS, BEFORE_LAYERS, NO_NUMBERS, kept_by
from cosmos_core.models.head import most_logits
from cosmos_core.models.parallel.expert import is_experts
from cosmos_core.models.parallel.float8 import candidates
from cosmos_core.models.parallel.forwards import own_parameters
from cosmos_core.models.parallel.parallelize import shared_heads
from cosmos_core.models.parallel.plan import KEYS_AND_VALUES, QUERIES, ParallelPlan, head_width, plan_for, split_names
from cosmos_core.models.parallel.stages import Anatomy, layers_name, obstacle, widths
from cosmos_core.models.tokenizer import TextEncoder
from cosmos_core.models.weights.loading import first_line
from cosmos_core.protocols import ModelFacts
from cosmos_core.protocols.facts import Compute, Extent, Kept, ModelPart
from cosmos_core.protocols.layout import Axis

Prepare: TypeAlias = Callable[[PreTrainedModel, int], Callable[[], object]]
"""Makes a forward of a model over so many units."""

_OF_PACKED_ROWS: Final[tuple[Axis, ...]] = ("tp", "cp", "pp")
_ALONE: Final = (
    "each document is a row of its own and runs as transformers has it, which is slow: they cannot be packed, since "
)


def describe(
    shell: PreTrainedModel,
    overrides: Mapping[str, str],
    text: TextEncoder,
    absent: str,
    prepare: Prepare,
    *,
    alone_because: str = "",
) -> ModelFacts:
    """The facts of a model on the meta device, which is of no use once its parts were asked for.

    `overrides` are the plugin's tensor parallel styles, `absent` says what is missing of a checkpoint, if anything is,
    `prepare` makes a forward of the shell over so many units, and `alone_because` says why each document is a row of
    its own, if it is. A ConfigError says that the model's numbers do not fit together.
    """
    config, tokenizer, plan = shell.config.get_text_config(), text.tokenizer, plan_for(shell, overrides)
    embedding, output = shell.get_input_embeddings().weight, shell.get_output_embeddings()
    is_tied = output is not None and output.weight is embedding
    return ModelFacts(
        architecture=type(shell).__name__,
        num_parameters=shell.num_parameters(),
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        tokenizer_size=max(tokenizer.get_vocab().values(), default=-1) + 1,
        context_length=getattr(config, "max_position_embeddings", None) or 1 << 20,
        stop_ids=text.stop_ids(),
        pad_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else text.stop_id(),
        cache_size=cache_values(config),
        compressed_cache_size=compressed_values(config),
        head_size=head_size(config),
        matrix_parameters=matrix_parameters(shell),
        attention_width=attention_width(config),
        num_tied_parameters=embedding.numel() if is_tied else 0,
        extents=extents_of(shell, plan),
        impossible=impossible_axes(shell, alone_because),
        attends_pluggably=not alone_because,
        notices=(_ALONE + alone_because,) if alone_because else (),
        most_outputs=most_logits(torch.device("cuda")),
        absent_weights=absent,
        linear_layers=frozenset(candidates(shell)),
        matrices=matrices_of(shell),
        column_split=column_split(shell, plan),
        parts=_Measured(lambda: _parts(shell, plan, None if alone_because else prepare)),
    )


class _Measured(Sequence[ModelPart]):
    """Parts that are measured once they are asked for, which takes a second: replicas do not ask."""

    def __init__(self, measure: Callable[[], tuple[ModelPart, ...]]) -> None:
        self._measure: Final = functools.cache(measure)

    @overload
    def __getitem__(self, index: int) -> ModelPart: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ModelPart, ...]: ...
    def __getitem__(self, index: int | slice) -> ModelPart | tuple[ModelPart, ...]:
        return self._measure()[index]

    def __len__(self) -> int:
        return len(self._measure())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self[:] == tuple(other)

    __hash__ = None  # type: ignore[assignment] # as of the mappings that parts have

    def __repr__(self) -> str:
        return repr(self[:])


def _parts(module: PreTrainedModel, plan: ParallelPlan, prepare: Prepare | None) -> tuple[ModelPart, ...]:
    """The part before the layers, runs of alike layers, and the part behind, with what each keeps, if it is known.

    `prepare` is None where rows are single documents: layers that go through them unit by unit take minutes to trace.
    """
    anatomy = Anatomy.of(module)
    if anatomy is None:
        return ()
    split, heads = split_names(plan, module), shared_heads(module, plan)
    holders = {name: own_parameters(child) for name, child in module.named_modules() if is_experts(child)}
    experts = {f"{name}.{key}" for name, own in holders.items() for key in own}

    def part(name: str, held: Iterable[tuple[str, nn.Parameter]], **layers: Any) -> ModelPart:
        sizes = {own: parameter.numel() for own, parameter in held}
        by_heads: Counter[int] = Counter()
        for own, size in sizes.items():
            if own in heads:
                by_heads[heads[own]] += size
        return ModelPart(
            name=name,
            num_parameters=sum(sizes.values()),
            num_expert_parameters=sum(size for own, size in sizes.items() if own in experts),
            num_whole_parameters=sum(size for own, size in sizes.items() if own not in split and own not in experts),
            head_parameters=dict(by_heads),
            **layers,
        )

    outside = [pair for pair in module.named_parameters() if not pair[0].startswith(f"{anatomy.name}.")]
    last = _last(module, anatomy)
    found = [part("embedding", [pair for pair in outside if id(pair[1]) not in last])]
    first = 0
    for layer, count in anatomy.kinds():
        own = layer.named_parameters(prefix=f"{anatomy.name}.{first}")
        name = layers_name(first + 1, count)
        found.append(part(name, own, count=count, is_layer=True, widths=widths(layer)))
        first += count
    found.append(part("head", [pair for pair in outside if id(pair[1]) in last]))
    kept = {} if prepare is None else _kept(module, anatomy, prepare, plan)
    places = [BEFORE_LAYERS, *range(len(found) - 2), AFTER_LAYERS]
    return tuple(attrs.evolve(part, kept=kept.get(place, {})) for part, place in zip(found, places, strict=True))


def _last(module: PreTrainedModel, anatomy: Anatomy) -> set[int]:
    """Parameters behind the layers: the last norm, and the output layer unless it is tied to the embedding."""
    children = list(module.get_decoder().children())
    behind = children[next((i + 1 for i, each in enumerate(children) if each is anatomy.layers), len(children)) :]
    behind += filter(None, [module.get_output_embeddings()])
    embedding = {id(parameter) for parameter in module.get_input_embeddings().parameters()}
    return {id(parameter) for child in behind for parameter in child.parameters()} - embedding


def _kept(
    module: PreTrainedModel, anatomy: Anatomy, prepare: Prepare, plan: ParallelPlan
) -> Mapping[int, Mapping[Compute, Kept]]:
    layers = [layer for layer, _ in anatomy.kinds()]
    parts = [pair for layer in layers for pair in layer.named_modules(prefix=f"{anatomy.name}.0")]
    linear = [each for name, each in parts if isinstance(each, nn.Linear) and "colwise" not in plan.style_of(name)]
    whole = [block for layer in layers for block in _whole_blocks(layer, anatomy.name, plan)]
    wide = dict.fromkeys(linear, False) | dict.fromkeys(whole, True)
    module.set_submodule(anatomy.name, nn.ModuleList(layers))
    try:
        return kept_by(module, layers, lambda units: prepare(module, units), wide)
    except NO_NUMBERS as error:
        config = module.config.get_text_config()
        names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_experts_per_tok")
        given = {name: getattr(config, name, None) for name in names}
        numbers = ", ".join(f"{name} = {value}" for name, value in given.items() if value is not None)
        raise ConfigError(
            f"model: a forward of {type(module).__name__} with this config fails: {first_line(error)}; its numbers do "
            f"not fit together ({numbers})"
        ) from error


def _whole_blocks(layer: nn.Module, name: str, plan: ParallelPlan) -> Iterator[nn.Module]:
    """Blocks of a layer of which neither `tp` nor `ep` splits anything."""
    for block, child in layer.named_children():
        parts = [(f"{name}.0.{block}.{part}".rstrip("."), module) for part, module in child.named_modules()]
        own = [f"{part}.{key}" for part, module in parts for key in own_parameters(module)]
        is_split = any(plan.style_of(part) != "replicate" for part in (*(part for part, _ in parts), *own))
        if not is_split and not any(is_experts(module) for _, module in parts):
            yield child


def extents_of(module: PreTrainedModel, plan: ParallelPlan) -> tuple[Extent, ...]:
    """The numbers of a model that axes must divide."""
    config = module.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    found: list[Extent] = []
    if isinstance(heads, int):
        found += [Extent(axis=axis, name="attention heads", size=heads) for axis in ("tp", "cp")]
        shared = getattr(config, "num_key_value_heads", None) or heads
        found.append(Extent(axis="tp", name="key-value heads", size=shared, is_shared=True))
    sizes = {
        child.out_features
        for name, child in module.named_modules()
        # Those of heads are counted in heads.
        if isinstance(child, nn.Linear)
        and plan.style_of(name) == "colwise"
        and name.rpartition(".")[2] not in QUERIES | KEYS_AND_VALUES | {"kv_b_proj"}
    }
    found += [Extent(axis="tp", name="columns of a feed-forward layer", size=size) for size in sorted(sizes)]
    experts = {int(child.num_experts) for child in module.modules() if is_experts(child)}
    found += [Extent(axis="ep", name="experts", size=size) for size in sorted(experts)]
    return tuple(found)


def impossible_axes(module: PreTrainedModel, alone_because: str = "") -> Mapping[Axis, str]:
    """Axes that make no sense for the architecture, and why."""
    found: dict[Axis, str] = {}
    if alone_because:
        found |= dict.fromkeys(_OF_PACKED_ROWS, f"its documents cannot be packed: {alone_because}")
    if not any(is_experts(child) for child in module.modules()):
        found["ep"] = "it has no experts"
    if alone_because:
        return found
    if Anatomy.of(module) is None:
        found["pp"] = "it has no list of layers to cut"
    elif reason := obstacle(module):
        found["pp"] = reason
    return found


def matrices_of(module: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Weights that rollout replicas may hold in few bits, by canonical name: those of the layers' linear layers.

    Of stacked experts, too, [experts, out, in]; those that lie transposed stay, and so does what chooses or weighs
    experts: a linear layer right beside them.
    """
    anatomy = Anatomy.of(module)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    blocks = () if anatomy is None else anatomy.layers.named_modules(prefix=anatomy.name)
    names = [name for prefix, block in blocks for name in _matrices_in(prefix, block)]
    # Of tied ones only the first travels.
    return {name: shapes[name] for name in names if name in shapes}


def column_split(module: PreTrainedModel, plan: ParallelPlan) -> frozenset[str]:
    """Names of the weights of linear layers whose columns `tp` splits."""
    return frozenset(
        f"{name}.weight"
        for name, child in module.named_modules()
        if isinstance(child, nn.Linear) and plan.style_of(name) in {"rowwise", "rowwise_split_input"}
    )


def _matrices_in(prefix: str, block: nn.Module) -> Iterator[str]:
    has_experts = any(is_experts(child) for child in block.children())
    for name, child in block.named_children():
        if isinstance(child, nn.Linear) and not has_experts:
            yield f"{prefix}.{name}.weight"
        elif is_experts(child) and getattr(child, "is_transposed", None) is False:
            yield from (f"{prefix}.{name}.{key}" for key, value in own_parameters(child).items() if value.dim() == 3)


def matrix_parameters(module: PreTrainedModel) -> int:
    """Parameters of the layers' matrices that one unit goes through; 0 where that is not known."""
    anatomy, chosen = Anatomy.of(module), getattr(module.config.get_text_config(), "num_experts_per_tok", None)
    found = 0
    for child in () if anatomy is None else anatomy.layers.modules():
        if isinstance(child, nn.Linear):
            found += child.weight.numel()
        elif is_experts(child):
            if not isinstance(chosen, int):
                return 0
            matrices = (value.numel() for value in own_parameters(child).values() if value.dim() == 3)
            found += sum(matrices) * chosen // child.__dict__["num_experts"]
    return found


def attention_width(config: PretrainedConfig) -> int:
    """Values of the heads of all layers that attend to all units: the mean of keys and values where these differ."""
    heads, width = getattr(config, "num_attention_heads", None), head_width(config) or 0
    both = (getattr(config, name, None) or width for name in ("qk_head_dim", "v_head_dim"))
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return kinds.count("full_attention") * heads * sum(both) // 2 if isinstance(heads, int) else 0


def cache_values(config: PretrainedConfig) -> int:
    """Values that generation caches for one unit: keys and values of every layer; 0 where the config does not say."""
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    width = head_width(config) or 0
    keys = getattr(config, "qk_head_dim", None) or width
    values = getattr(config, "v_head_dim", None) or width
    return config.num_hidden_layers * heads * (keys + values) if isinstance(heads, int) else 0


def compressed_values(config: PretrainedConfig) -> int:
    """Values of one unit that keys and values of latent attention are made of, in every layer; 0 without it."""
    rank = getattr(config, "kv_lora_rank", None)
    return config.num_hidden_layers * (rank + config.qk_rope_head_dim) if rank else 0


def head_size(config: PretrainedConfig) -> int:
    """Values of one head of attention; 0 where keys and values differ, or the config does not say."""
    if getattr(config, "qk_head_dim", None) or getattr(config, "v_head_dim", None):
        return 0
    return head_width(config) or 0
