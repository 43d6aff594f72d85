"""Checks at start: refuse a model that would decode to something else than its own forward says."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any, Final

import torch

from cosmos_core.errors import EngineError
from cosmos_core.models.attention.packed import attend_with
from cosmos_core.rollout.embedded.attention import SlotStep
from cosmos_core.rollout.embedded.cache import LayerShape
from cosmos_core.rollout.embedded.interface import NAME, AttentionModule, Call, Variant
from cosmos_core.rollout.embedded.paged import cache_for, step_over
from cosmos_core.rollout.embedded.plan import Chunk, Fork, Plan
from cosmos_core.rollout.embedded.runner import Runner

_PROBE_UNITS: Final = 12
_PROBE_PREFIX: Final = 7
_LIMITS: Final = {torch.float64: 1e-3, torch.float32: 1e-3}
_LOW_PRECISION_LIMIT: Final = 0.1
"""Mean difference of log-probs: rounding gives at most 0.02 in bfloat16."""

_REFUSED_EXTRAS: Final = ("attention_mask", "head_mask", "position_bias", "alibi", "cu_seq_lens_q", "indices")


class AttentionProbe:
    """A step that notes how a module attends (plain causal attention over one short sequence)."""

    def __init__(self) -> None:
        self.calls: dict[int, Call] = {}

    def attend(
        self,
        module: AttentionModule,
        *,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        variant: Variant,
        extras: dict[str, Any],
    ) -> torch.Tensor:
        """Note the call (`Step.attend`)."""
        layer = getattr(module, "layer_idx", None)
        kind = type(module).__name__
        if not isinstance(layer, int) or layer in self.calls:
            raise EngineError(f"{kind} has no layer_idx of its own ({layer!r} seen before): no place in the KV cache")
        given = [name for name in _REFUSED_EXTRAS if extras.get(name) is not None]
        if given or extras.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            feature = given[0] if given else "is_causal=False"
            raise EngineError(f"{kind} attends with {feature}, which the embedded engine does not support")
        shape = LayerShape(num_heads=keys.shape[0], key_dim=keys.shape[-1], value_dim=values.shape[-1])
        self.calls[layer] = Call(shape=shape, variant=variant)
        step = SlotStep.alone(queries.shape[1], queries.device)
        return step.attend(module, queries=queries, keys=keys, values=values, variant=variant, extras={})


def install_attention(
    module: torch.nn.Module, runner: Runner, *, context_length: int, verify: bool, compiles: bool = False
) -> dict[int, Call]:
    """Let a Hugging Face module attend through the engine; gives how each layer does.

    What is compared with the module's own forward is the compiled one, if the runner is to compile it.

    Raises:
        EngineError: It cannot be served, or not be compiled; names the feature.
    """
    _check_class(module)
    config: Any = module.config
    _check_config(config, context_length)
    device = next(module.parameters()).device
    vocabulary = module.get_input_embeddings().num_embeddings  # type: ignore[operator]
    size = min(_PROBE_UNITS, context_length)
    tokens_N = torch.arange(1, size + 1, device=device) * 7919 % vocabulary
    positions_N = torch.arange(size, device=device)
    _own_config(module)
    own_NV = None
    if verify:
        attend_with(module, "eager")
        own_NV = module(input_ids=tokens_N[None], use_cache=False).logits[0].float()
    attend_with(module, NAME)
    probe = AttentionProbe()
    runner.forward(tokens_N, positions_N, probe, None)
    _check_layers(type(module).__name__, config, probe.calls, context_length)
    if compiles:
        runner.compile(tokens_N, positions_N)
    if own_NV is not None:
        dtype = next(module.parameters()).dtype
        _verify(type(module).__name__, runner, calls=probe.calls, tokens_N=tokens_N, own_NV=own_NV, dtype=dtype)
    return probe.calls


def _own_config(module: torch.nn.Module) -> None:
    """Part a module from modules that share its config: which attention to call is written there."""
    copies: dict[int, Any] = {}
    for part in module.modules():
        config = part.__dict__.get("config")
        if config is not None:
            part.__dict__["config"] = copy.deepcopy(config, copies)


def _check_class(module: torch.nn.Module) -> None:
    name = type(module).__name__
    if not hasattr(module, "set_attn_implementation") or not hasattr(module, "config"):
        raise EngineError(f"{name} is no Hugging Face model: the embedded engine cannot take over its attention")
    for argument in ("input_ids", "position_ids"):
        if argument not in inspect.signature(module.forward).parameters:
            raise EngineError(f"{name}.forward takes no {argument}: the embedded engine cannot pack sequences")


def _check_config(config: Any, context_length: int) -> None:
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)}
    moving = kinds & {"dynamic", "longrope"}
    original: int = rope.get("original_max_position_embeddings") or text.max_position_embeddings
    if moving and context_length > original:
        raise EngineError(
            f"rope type {moving.pop()!r} changes with the longest sequence in flight above {original} units; shorten "
            f"prompts and rollout.sampling.max_units (context length {context_length}) or use another engine"
        )


def _check_layers(name: str, config: Any, calls: dict[int, Call], context_length: int) -> None:
    text = config.get_text_config()
    number = text.num_hidden_layers
    kinds: Sequence[str] = getattr(text, "layer_types", None) or ["full_attention"] * number
    for layer in range(number):
        kind = kinds[layer] if layer < len(kinds) else "full_attention"
        call = calls.get(layer)
        if call is None:
            raise EngineError(
                f"layer {layer} of {name} ({kind}) does not attend through Hugging Face's attention interface: the "
                "embedded engine supports layers of full and sliding attention only"
            )
        limit = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}.get(kind)
        width: int | None = getattr(text, limit, None) if limit else None
        if width is not None and width < context_length and call.variant.window is None:
            raise EngineError(f"layer {layer} of {name} is of {kind} but does not say its width: not supported")


def _verify(
    name: str,
    runner: Runner,
    *,
    calls: dict[int, Call],
    tokens_N: torch.Tensor,
    own_NV: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """Prefill a prefix in one slot, fork it to another, decode the rest in both, compare with one plain forward."""
    size, prefix = len(tokens_N), min(_PROBE_PREFIX, len(tokens_N))
    cache = cache_for(calls, dtype, tokens_N.device, num_slots=2, step=size, longest=size)
    places = torch.arange(size, device=tokens_N.device)
    chunk, fork = Chunk(first=0, last=prefix, start=0, slot=0), Fork(source=0, targets=(1,), num_units=prefix)
    plan = Plan(lengths=[prefix, prefix], longest=size, num_decoding=0, chunks=(chunk,), forks=(fork,))
    cache.prepare(plan)
    first = step_over(cache, plan, torch.zeros_like(places[:prefix]), places[:prefix])
    rows = [runner.forward(tokens_N[:prefix], places[:prefix], first, None)]
    for unit in range(prefix, size):
        here = places[unit].expand(2)
        plan = Plan(lengths=[unit + 1, unit + 1], longest=size, num_decoding=2)
        cache.prepare(plan)
        step = step_over(cache, plan, places[:2], here)
        rows.append(runner.forward(tokens_N[unit].expand(2), here, step, None)[1:])
    found, expected = torch.cat(rows).log_softmax(-1), own_NV.log_softmax(-1)
    worst = (found - expected).abs().mean(-1).max().item()
    limit = _LIMITS.get(dtype, _LOW_PRECISION_LIMIT)
    if not worst <= limit:
        raise EngineError(
            f"{name} decodes to other log-probs than its own forward (mean difference {worst:.2g}, allowed {limit:g}): "
            "it keeps a state or attends in a way that the embedded engine does not know; use another engine"
        )
