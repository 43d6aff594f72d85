"""Tries a model on a small one of its make: whether its documents can be packed, and what it gives is its own.

Any causal language model of transformers may be named in a recipe. Some cannot be packed (recurrent layers carry a
state over a document's end, some attend in a way of their own), some scale their logits. Instead of a list of names,
each is tried on two short documents: when it is planned, and once more when it is built, itself where it is whole.

The small model has as few layers as hold every kind, fewer heads and drawn weights. Widths of a head stay as they are,
since rotary angles and scales depend on them; the number of heads, and every width that they make up, is another. Two
processes can share heads and experts, whatever number of processes can share those of the model.

Shape legend: U units of a row, V vocabulary.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from cosmos_core.errors import ConfigError, PluginIncompatibleError, UntriedError
from cosmos_core.models.attention.packed import attend_packed, is_packed
from cosmos_core.models.building import Blueprint, draw, make_shell
from cosmos_core.models.parallel.channel import open_channel
from cosmos_core.models.parallel.expert import is_experts
from cosmos_core.models.parallel.stages import Anatomy
from cosmos_core.models.tokens import tokens_payload
from cosmos_core.models.weights import loading
from cosmos_core.types import Payload

KNOWN_LAYERS: Final = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers that attend within packed documents."""
LONGEST_WINDOW: Final = 256
"""Sliding windows up to this length are exercised; longer ones would make the check slow."""
_SHORT: Final = 5

Logits = Callable[[PreTrainedModel, torch.Tensor, Sequence[int]], torch.Tensor]
"""Gives the logits [U, V] of documents, of tokens [U] and their lengths, one row of all of them."""


@torch.no_grad()
def verify(module: PreTrainedModel, logits: Logits) -> None:
    """Compare the logits of two documents, in one row if they are packed, with those of transformers' own forward.

    Raises:
        PluginIncompatibleError: They differ; or those of a document depend on units that come later.
    """
    config = module.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    lengths = (window + 3 if isinstance(window, int) and 0 < window <= LONGEST_WINDOW else 7, _SHORT)
    ids = torch.randint(0, config.vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    documents = torch.split(ids.to(module.device), list(lengths))
    own = own_logits(module, [{"input_ids": each[None]} for each in documents])
    advice = "a model plugin must override HuggingFaceModel.logits or HuggingFaceModel.hidden for it"
    if is_packed(module):
        compare(module, logits(module, torch.cat(documents), lengths), own, advice)
        return
    compare(module, torch.cat([logits(module, each, [len(each)]) for each in documents]), own, advice)
    first = documents[0][:_SHORT]
    if not _difference(logits(module, first, [_SHORT]), own[:_SHORT]) <= _tolerance(module, own):
        raise PluginIncompatibleError(
            f"{type(module).__name__} is not causal: its logits of a document's first {_SHORT} units are others when "
            "more units follow, and what it trains on would have been seen; take a decoder"
        )


def own_logits(module: PreTrainedModel, documents: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Logits [U, V] of transformers' own forward of each document alone, given as the arguments of that."""
    was_packed = is_packed(module)
    if was_packed:
        # Of transformers' attention functions only this one computes soft caps and attention sinks.
        module.set_attn_implementation("eager")
    try:
        return torch.cat([module(**given, use_cache=False).logits[0] for given in documents])
    finally:
        if was_packed:
            attend_packed(module)


def compare(module: PreTrainedModel, found: torch.Tensor, own: torch.Tensor, advice: str) -> None:
    """Compare logits [U, V] of documents with those of transformers' own forward of each.

    Raises:
        PluginIncompatibleError: They differ; the message ends in the advice.
    """
    difference, tolerance = _difference(found, own), _tolerance(module, own)
    if not difference <= tolerance:
        how = "packed logits differ" if is_packed(module) else "logits differ"
        raise PluginIncompatibleError(
            f"{type(module).__name__}: {how} from its own forward by {difference:.3g} (allowed "
            f"{tolerance:.3g}); {advice}"
        )


def _difference(found: torch.Tensor, own: torch.Tensor) -> float:
    return (found.float() - own.float()).abs().max().item()


def _tolerance(module: PreTrainedModel, own: torch.Tensor) -> float:
    return (1e-3 if module.dtype == torch.float32 else 0.1) * max(own.float().abs().max().item(), 1.0)


_HEADS: Final = 4
_MULTIPLE: Final = 8
"""Of inner widths, as products of experts want it."""
_VOCABULARY: Final = 512
"""Of a small model that is tried on any tokens."""
_DEPTHS: Final = ("num_hidden_layers", "depth", "num_layers")
_SPREADS: Final = ("initializer_range", "init_std")
"""What configs call the standard deviation of drawn weights."""
_MOST_PARAMETERS: Final = 10**9
_LOG: Final = logging.getLogger(__name__)


def tiny_configs(shell: PreTrainedModel, *, keeps_ids: bool, num_layers: int = 1) -> Iterator[PretrainedConfig]:
    """Configs of small models, the smaller first; not all of them need make a model."""
    # The fewest first layers that hold every kind of layer.
    anatomy = Anatomy.of(shell)
    listed = [1 + max(map(value.index, value)) for value in _per_layer(shell.config.get_text_config()).values()]
    depth = max(num_layers if anatomy is None else anatomy.num_covering, *listed, num_layers)
    for make_narrow in (True, False):
        config = copy.deepcopy(shell.config)
        _shorten(config, depth)
        if make_narrow:
            _narrow(config)
            _make_even(config, {each.num_experts for each in shell.modules() if is_experts(each)})
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
    width, heads = text.hidden_size, getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int):
        return
    # Two processes share them, and each key and value is several queries' own if it was.
    text.num_attention_heads = left = _HEADS if heads > 2 else heads
    shared = getattr(text, "num_key_value_heads", None)
    if isinstance(shared, int):
        text.num_key_value_heads = left if shared == heads else min(shared, left // 2)
    text.hidden_size = width * left // heads
    for name, value in list(vars(text).items()):
        # The width inside a feed-forward block or an expert.
        if name.endswith("intermediate_size") and isinstance(value, int):
            setattr(text, name, math.ceil(value * left / heads / _MULTIPLE) * _MULTIPLE)
    # What a tower gives has the width of the text's hidden states, whatever that is called.
    for other in _others(config):
        for name, value in list(vars(other).items()):
            if value == width and isinstance(value, int) and name != "hidden_size":
                setattr(other, name, text.hidden_size)


def _make_even(config: PretrainedConfig, counts: Collection[int]) -> None:
    """Twice as many experts, where two processes could not share them; groups of them stay groups."""
    text: Any = config.get_text_config()
    for name, value in list(vars(text).items()):
        if "expert" in name and isinstance(value, int) and value in counts and value % 2:
            setattr(text, name, 2 * value)


def _enlarge_weights(config: PretrainedConfig) -> None:
    """Weights under which hidden states keep their size, so that mistakes show."""
    text: Any = config.get_text_config()
    for each in (text, *_others(config)):
        for name in _SPREADS:
            own = getattr(each, name, None)
            if isinstance(own, float):
                setattr(each, name, max(own, text.hidden_size**-0.5))


def _others(config: PretrainedConfig) -> list[Any]:
    """The configs of everything but the text, the whole first; of a model of text alone, none."""
    text = config.get_text_config()
    if text is config:
        return []
    parts = [getattr(config, name) for name in config.sub_configs]
    return [config, *(part for part in parts if isinstance(part, PretrainedConfig) and part is not text)]


Verify = Callable[[PreTrainedModel], None]
"""Checks a module; raises a PluginIncompatibleError."""


def reason_not_to_pack(blueprint: Blueprint, verify: Verify) -> str:
    """The reason why documents of a model are rows of their own; empty where they can be packed.

    Raises:
        PluginIncompatibleError: A row of its own does not give what transformers' own forward gives, either.
    """
    kinds = set(getattr(blueprint.config.get_text_config(), "layer_types", None) or ()) - KNOWN_LAYERS
    if kinds:
        reason = f"it has {', '.join(sorted(map(str, kinds)))} layers"
    else:
        try:
            find_small(blueprint, verify)
        except (PluginIncompatibleError, UntriedError) as error:
            reason = str(error)
        else:
            return ""
    try:
        find_small(attrs.evolve(blueprint, is_packed=False), verify)
    except UntriedError:
        # Where neither can be tried, the model itself is checked when it is built.
        return reason if kinds else ""
    return reason


def verify_tiny(blueprint: Blueprint, verify: Verify, *, keeps_ids: bool = False) -> None:
    """Check a small model of the same make, drawn on the CPU, where the model itself is nowhere whole.

    If none can be made that transformers' own forward runs on, the model goes unchecked, and a warning says so.
    """
    try:
        find_small(blueprint, verify, keeps_ids=keeps_ids)
    except UntriedError as error:
        _LOG.warning(
            "%s is not compared with transformers' own forward: no small model of its make could be tried (%s)",
            blueprint.config.model_type,
            error,
        )


def find_small(
    blueprint: Blueprint, verify: Verify, *, keeps_ids: bool = False, num_layers: int = 1
) -> PretrainedConfig:
    """The config of a small model of the same make that passes the check.

    It has at least `num_layers` layers, if the model has them.

    Raises:
        UntriedError: None could be made that transformers' own forward runs on.
        PluginIncompatibleError: The first that could does not pass.
    """
    reasons = []
    # Not packed, and so of any make: some cannot even be made with packed attention.
    shell = make_shell(attrs.evolve(blueprint, is_packed=False))
    for config in tiny_configs(shell, keeps_ids=keeps_ids, num_layers=num_layers):
        small = attrs.evolve(blueprint, config=config)
        try:
            size = make_shell(small).num_parameters()
            if size <= _MOST_PARAMETERS:
                verify(draw(small).eval())
                return config
            reasons.append(f"one would have {size:,} parameters")
        except (ConfigError, *loading.LIBRARY_ERRORS) as error:
            reasons.append(loading.first_line(error))
    raise UntriedError("; ".join(dict.fromkeys(reasons)))


def trial_payloads(vocab_size: int) -> list[Payload]:
    """Ragged sequences of a prompt and a completion, to train a small model on."""
    draws = np.random.default_rng(0)
    sizes = ((5, 20), (9, 3), (2, 31), (14, 9))
    return [tokens_payload(*(draws.integers(0, vocab_size, size).tolist() for size in each)) for each in sizes]


def check_tiny_model(blueprint: Blueprint, verify: Verify) -> None:
    """Let the first process check a small model of the same make; every process of the mesh calls it."""
    said, failure = open_channel().lead(
        lambda: verify_tiny(blueprint, verify), lambda error: str(error) or type(error).__name__
    )
    if said:
        raise PluginIncompatibleError(said) from failure
