"""The engine behind Hugging Face's own attention interface.

An unmodified module is called with all tokens of a step as one row [1, N] and `use_cache=False`; its attention layers
call the function registered here, which finds what the step means in a thread-local. No mask function is registered
under the name: Hugging Face builds no mask for a name that it does not know, and the function is given None. In a
compiled forward the call is an operator, which looks there when it runs.

Shape legend: N tokens of the step, H query heads, K key-value heads, D head dim.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Final, Protocol, TypeAlias

import attrs
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cosmos_core.rollout.embedded.cache import LayerShape
from cosmos_core.rollout.embedded.compiled import operator

NAME: Final = "cosmos_slots"


@attrs.frozen(kw_only=True)
class Variant:
    """The variant of attention that a layer asks for."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks_H: torch.Tensor | None = None


@attrs.frozen(kw_only=True)
class Call:
    """One call of the attention function."""

    shape: LayerShape
    variant: Variant


@attrs.frozen
class Layer:
    """All that a compiled forward tells of an attention module."""

    layer_idx: int


AttentionModule: TypeAlias = torch.nn.Module | Layer


class Step(Protocol):
    """The attention of one forward."""

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
        """Attend with queries [H, N, D], keys and values [K, N, D]; returns [N, H, D], in order."""
        ...


class _Current(threading.local):
    step: Step | None = None
    is_doubled: bool = False


_CURRENT: Final = _Current()


@contextlib.contextmanager
def step_context(step: Step, *, is_doubled: bool = False) -> Iterator[None]:
    """Forwards of this thread mean `step` inside.

    If doubled, its one unit is fed twice, to a compiled forward, which takes one for a constant.
    """
    _CURRENT.step, _CURRENT.is_doubled = step, is_doubled
    try:
        yield
    finally:
        _CURRENT.step, _CURRENT.is_doubled = None, False


def _attention(  # noqa: PLR0917 - called by Hugging Face's modules
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Not `is_compiling`, which is so for the whole process while any engine in it compiles.
    if torch.compiler.is_dynamo_compiling():
        layer = module.layer_idx
        return _attend(query[0], key[0], value[0], layer, scaling, sliding_window, softcap, s_aux)[None], None
    step = _CURRENT.step
    assert step is not None, "a module of the embedded engine was called outside of it"
    if attention_mask is not None:
        extras["attention_mask"] = attention_mask
    variant = Variant(scaling=scaling, window=sliding_window, softcap=softcap, sinks_H=s_aux)
    attended = step.attend(module, queries=query[0], keys=key[0], values=value[0], variant=variant, extras=extras)
    return attended[None], None


ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)


def _attend_now(  # noqa: PLR0917 - an operator's
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layer: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    step = _CURRENT.step
    assert step is not None, "a compiled forward of the embedded engine was called outside of it"
    variant = Variant(scaling=scaling, window=window, softcap=softcap, sinks_H=sinks)
    if not _CURRENT.is_doubled:
        return step.attend(Layer(layer), queries=queries, keys=keys, values=values, variant=variant, extras={})
    queries, keys, values = queries[:, :1], keys[:, :1], values[:, :1]
    attended = step.attend(Layer(layer), queries=queries, keys=keys, values=values, variant=variant, extras={})
    return attended.repeat(2, 1, 1)


_attend: Final = operator(
    "attend(Tensor queries, Tensor keys, Tensor values, int layer, float scaling, int? window, float? softcap, "
    "Tensor? sinks) -> Tensor",
    _attend_now,
    lambda queries, _keys, values, *_: values.new_empty(queries.shape[1], queries.shape[0], values.shape[-1]),
)
