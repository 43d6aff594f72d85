"""Builds a process's part of a model: cut, laid over the mesh, only then given memory and weights, and checked.

The check makes a generic model safe: packed evaluation against transformers' own forward. Any causal language model of
transformers may be named in a recipe. Some cannot be packed (recurrent layers carry state over a document's end), some
scale their logits in ways of their own. Instead of a list of names, each model is tried once when it is built, on two
short documents: itself where it is whole, else a tiny one of the same make.

The tiny model has as few layers as hold every kind, fewer heads and drawn weights. Widths of a head stay as they are,
since rotary angles and scales depend on them; the number of heads, and every width that they make up, is divided.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from cosmos_core.errors import ConfigError, PluginIncompatibleError
from cosmos_core.models.attention.packed import attend_packed
from cosmos_core.models.parallel.channel import open_channel
from cosmos_core.models.parallel.expert import is_experts
from cosmos_core.models.parallel.float8 import check_float8
from cosmos_core.models.parallel.lora import check_adapted, draw_adapters, with_adapters
from cosmos_core.models.parallel.parallelize import parallelize
from cosmos_core.models.parallel.plan import plan_for
from cosmos_core.models.parallel.stages import Anatomy, Stages, cut
from cosmos_core.models.weights import loading
from cosmos_core.models.weights.streaming import Streamed, fill, materialise, weights_of
from cosmos_core.protocols import Layout

KNOWN_LAYERS: Final = frozenset({"full_attention", "sliding_attention"})


@attrs.frozen(kw_only=True, eq=False)
class Blueprint:
    """A model that is to be built: with weights of the checkpoint at `path`, or where that is None with drawn ones."""

    config: PretrainedConfig
    path: str | None
    seed: int
    dtype: torch.dtype
    device: torch.device
    trust_remote_code: bool
    auto_class: Any
    tensor_plan: Mapping[str, str]


def build_whole(blueprint: Blueprint) -> PreTrainedModel:
    """All of it in this process."""
    if blueprint.path is None:
        return draw(blueprint).to(device=blueprint.device, dtype=blueprint.dtype).eval()
    shell = _shell(blueprint)
    streamed = Streamed(blueprint.path, shell)
    materialise([shell], device=blueprint.device)
    fill([shell], streamed.read, blueprint.path)
    return shell


def lay_out(module: PreTrainedModel, blueprint: Blueprint, layout: Layout) -> None:
    """Apply to all of it in this process what a layout of one process may ask for."""
    _check(module, blueprint, layout)
    parallelize(module, layout, plan_for(module, blueprint.tensor_plan))
    draw_adapters(module, blueprint.seed)


def build_part(blueprint: Blueprint, layout: Layout) -> nn.Module:
    """This process's part of it; every process of the mesh calls it.

    Weights of a checkpoint are streamed into shards. Weights that are drawn are drawn whole, on the CPU, and what the
    process does not hold is dropped: transformers draws in an order of its own, module within module, of which a part
    alone cannot be had.
    """
    shell = _shell(blueprint)
    _check(shell, blueprint, layout)
    # Before anything is split, so that every process finds the same fault in a checkpoint.
    streamed = Streamed(blueprint.path, shell).read if blueprint.path is not None else None
    stages = cut(shell, layout) if layout.mesh.size("pp") > 1 else [shell]
    for stage in stages:
        parallelize(stage, layout, plan_for(stage, blueprint.tensor_plan))
    materialise(stages, device=blueprint.device, offload=layout.cpu_offload)
    weights = streamed or weights_of(draw(blueprint))
    fill(stages, with_adapters(weights, blueprint.seed), blueprint.path)
    return Stages(stages) if layout.mesh.size("pp") > 1 else stages[0]


def check_layers(module: PreTrainedModel) -> None:
    """Refuse a model with layers that are known not to pack."""
    foreign = set(getattr(module.config.get_text_config(), "layer_types", None) or ()) - KNOWN_LAYERS
    if foreign:
        raise PluginIncompatibleError(
            f"{type(module).__name__} has {', '.join(sorted(foreign))} layers, which cannot be packed"
        )


def _shell(blueprint: Blueprint) -> PreTrainedModel:
    shell = loading.make_shell(blueprint.config, blueprint.auto_class, trust_remote_code=blueprint.trust_remote_code)
    attend_packed(shell)
    return shell.to(blueprint.dtype)


def _check(module: PreTrainedModel, blueprint: Blueprint, layout: Layout) -> None:
    check_layers(module)
    check_float8(module, layout, blueprint.device)
    anatomy, name = Anatomy.of(module), type(module).__name__
    layers = () if anatomy is None else anatomy.layers
    has_experts = any(is_experts(each) for layer in layers for each in layer.modules())
    if layout.lora is not None:
        check_adapted(layers, name, layout.lora)
    # A model without a list of layers is refused as such.
    if layout.mesh.size("ep") > 1 and layers and not has_experts:
        raise PluginIncompatibleError(
            f"{name} has no experts module that can be spread over processes: set policy.mesh.ep = 1"
        )


def draw(blueprint: Blueprint) -> PreTrainedModel:
    """All of it with weights drawn from the seed in float32 on the CPU: the same bits on every machine and device."""
    how = {"trust_remote_code": blueprint.trust_remote_code, "dtype": torch.float32}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(blueprint.seed)
        module = loading.make(blueprint.config, blueprint.auto_class, **how)
    attend_packed(module)
    return module


LONGEST_WINDOW: Final = 256
"""Sliding windows up to this length are exercised; longer ones would make the check slow."""


@torch.no_grad()
def verify_packing(
    module: PreTrainedModel, packed_logits: Callable[[PreTrainedModel, torch.Tensor, Sequence[int]], torch.Tensor]
) -> None:
    """Compare the logits [U, V] of packed documents, of tokens [U] and their lengths, with those of each alone.

    Raises:
        PluginIncompatibleError: They differ, or the model has layers that are known not to pack.
    """
    check_layers(module)
    config = module.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    lengths = (window + 3 if isinstance(window, int) and 0 < window <= LONGEST_WINDOW else 7, 5)
    ids = torch.randint(0, config.vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    ids = ids.to(module.device)
    packed = packed_logits(module, ids, lengths)
    compare(
        module,
        packed,
        own_logits(module, [{"input_ids": part[None]} for part in torch.split(ids, list(lengths))]),
        "a model plugin must override HuggingFaceModel.logits or HuggingFaceModel.hidden for it",
    )


def own_logits(module: PreTrainedModel, documents: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Logits [U, V] of transformers' own forward of each document alone, given as the arguments of that."""
    # Of transformers' attention functions only this one computes soft caps and attention sinks.
    module.set_attn_implementation("eager")
    try:
        return torch.cat([module(**given, use_cache=False).logits[0] for given in documents])
    finally:
        attend_packed(module)


def compare(module: PreTrainedModel, packed: torch.Tensor, alone: torch.Tensor, advice: str) -> None:
    """Compare logits [U, V] of packed documents with those of each alone.

    Raises:
        PluginIncompatibleError: They differ; the message ends in the advice.
    """
    difference = (packed.float() - alone.float()).abs().max().item()
    scale = max(alone.float().abs().max().item(), 1.0)
    tolerance = (1e-3 if module.dtype == torch.float32 else 0.1) * scale
    if not difference <= tolerance:
        raise PluginIncompatibleError(
            f"{type(module).__name__}: packed logits differ from its own forward by {difference:.3g} (allowed "
            f"{tolerance:.3g}); {advice}"
        )


_MULTIPLE: Final = 8
"""Of inner widths, as products of experts want it."""
_VOCABULARY: Final = 512
"""Of a small model that is tried on any tokens."""
_DEPTHS: Final = ("num_hidden_layers", "depth", "num_layers")
_LOG: Final = logging.getLogger(__name__)


def tiny_configs(shell: PreTrainedModel, *, keeps_ids: bool) -> Iterator[PretrainedConfig]:
    """Configs of small models, the smaller first; not all of them need make a model."""
    # The fewest first layers that hold every kind of layer.
    anatomy = Anatomy.of(shell)
    listed = [1 + max(map(value.index, value)) for value in _per_layer(shell.config.get_text_config()).values()]
    depth = max(1 if anatomy is None else anatomy.num_covering, *listed, 1)
    for make_narrow in (True, False):
        config = copy.deepcopy(shell.config)
        _shorten(config, depth)
        if make_narrow:
            _narrow(config)
            text: Any = config.get_text_config()
            if not keeps_ids and text.vocab_size > _VOCABULARY:
                text.vocab_size = _VOCABULARY
                text.pad_token_id = text.bos_token_id = text.eos_token_id = None
        _enlarge_weights(config)
        yield config


def _per_layer(config: Any) -> dict[str, list[Any]]:
    """Lists of a config with an entry for each layer."""
    number = config.num_hidden_layers
    return {name: value for name, value in vars(config).items() if isinstance(value, list) and len(value) == number}


def _shorten(config: PretrainedConfig, depth: int) -> None:
    text: Any = config.get_text_config()
    for name, value in _per_layer(text).items():
        setattr(text, name, value[:depth])
    text.num_hidden_layers = min(depth, text.num_hidden_layers)
    if isinstance(window := getattr(text, "sliding_window", None), int):
        # Short documents are to feel it.
        text.sliding_window = min(window, 8)
    # One layer of each tower beside the text's decoder; it adds to the text's layers if any of the tower does.
    for tower in _others(config)[1:]:
        for name in [name for name in _DEPTHS if isinstance(getattr(tower, name, None), int)][:1]:
            setattr(tower, name, 1)
        if getattr(tower, "deepstack_visual_indexes", None):
            tower.deepstack_visual_indexes = [0]


def _narrow(config: PretrainedConfig) -> None:
    text: Any = config.get_text_config()
    width, heads = text.hidden_size, text.num_attention_heads
    # Four heads are left, if that divides them.
    divisor = heads // math.gcd(heads, 4)
    shared = getattr(text, "num_key_value_heads", None)
    if isinstance(shared, int):
        text.num_key_value_heads = max(1, shared // divisor)
    for name in ("hidden_size", "num_attention_heads"):
        setattr(text, name, getattr(text, name) // divisor)
    for name, value in list(vars(text).items()):
        # The width inside a feed-forward block or an expert.
        if name.endswith("intermediate_size") and isinstance(value, int):
            setattr(text, name, math.ceil(value / divisor / _MULTIPLE) * _MULTIPLE)
    # What a tower gives has the width of the text's hidden states, whatever that is called.
    for other in _others(config):
        for name, value in list(vars(other).items()):
            if value == width and isinstance(value, int) and name != "hidden_size":
                setattr(other, name, text.hidden_size)


def _enlarge_weights(config: PretrainedConfig) -> None:
    """Weights under which hidden states keep their size, so that mistakes show."""
    text: Any = config.get_text_config()
    for each in (text, *_others(config)):
        own = getattr(each, "initializer_range", None)
        if isinstance(own, float):
            each.initializer_range = max(own, text.hidden_size**-0.5)


def _others(config: PretrainedConfig) -> list[Any]:
    """The configs of everything but the text, the whole first; of a model of text alone, none."""
    text = config.get_text_config()
    if text is config:
        return []
    parts = [getattr(config, name) for name in config.sub_configs]
    return [config, *(part for part in parts if isinstance(part, PretrainedConfig) and part is not text)]


def verify_tiny(blueprint: Blueprint, verify: Callable[[PreTrainedModel], None], *, keeps_ids: bool = False) -> None:
    """Check a small model of the same make, drawn on the CPU, where the model itself is nowhere whole.

    If none can be made that transformers' own forward runs on, the model goes unchecked, and a warning says so.
    """
    shell = _shell(blueprint)
    check_layers(shell)
    reasons = []
    for config in tiny_configs(shell, keeps_ids=keeps_ids):
        small = attrs.evolve(blueprint, config=config)
        try:
            size = _shell(small).num_parameters()
            if size <= 10**9:
                return verify(draw(small).eval())
            reasons.append(f"one would have {size:,} parameters")
        except (ConfigError, *loading.LIBRARY_ERRORS) as error:
            reasons.append(loading.first_line(error))
    _LOG.warning(
        "%s is not compared with transformers' own forward: no small model of its make could be tried (%s)",
        type(shell).__name__,
        "; ".join(reasons),
    )
    return None


def check_tiny_model(blueprint: Blueprint, verify: Callable[[PreTrainedModel], None]) -> None:
    """Let the first process check a small model of the same make; every process of the mesh calls it."""
    said, failure = open_channel().lead(
        lambda: verify_tiny(blueprint, verify), lambda error: str(error) or type(error).__name__
    )
    if said:
        raise PluginIncompatibleError(said) from failure
