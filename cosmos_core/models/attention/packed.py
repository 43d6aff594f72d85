"""Attention over packed documents, registered with transformers under `PACKED`.

Documents never see one another. The documents of a forward travel as the keyword `packing`, which transformers hands
through to every attention layer (through the recompute of activation checkpointing too); so does the slice of the row
that this process holds, where processes share it (see `context`). A call without it is refused, never guessed.

Shape legend: U units of the row (or of this process's slice), H heads, K key-value heads, D head dim.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers import AttentionInterface, PreTrainedModel

from cosmos_core.errors import PluginIncompatibleError
from cosmos_core.models.attention.context import attend_over_slices
from cosmos_core.models.attention.documents import Packing
from cosmos_core.models.attention.kernels import attend
from cosmos_core.models.attention.softmax import Scoring

PACKED: Final = "cosmos_packed"

REFUSED: Final = {
    "dropout": "dropout",
    "position_bias": "a bias of positions",
    "attention_bias": "a bias",
    "head_mask": "a mask of heads",
    "alibi": "a bias of positions",
}
"""Keywords that would change the result; what else layers pass on is for other attention functions."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed_attention(  # noqa: PLR0917 - transformers calls it by position
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    packing: Packing | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each document of the packing, called as transformers calls attention functions.

    Query [1, H, U, D], key and value [1, K, U, D]; `attention_mask` is always None. `sliding_window` is the number of
    units that a unit may look back, itself included; scores become softcap · tanh(score / softcap); `s_aux` [H] are the
    scores of attention sinks. Gives the output [1, U, H, D], and None for the weights. A PluginIncompatibleError says
    that the layer asks for what packed attention does not compute.
    """
    if packing is None or (what := _beyond(module, attention_mask, others)) is not None:
        what = "no packing" if packing is None else what
        raise PluginIncompatibleError(f"{type(module).__name__} calls packed attention with {what}: not supported")
    scoring = Scoring(scale=scaling, window=sliding_window, cap=softcap, sinks_H=s_aux)
    rows = (_heads_second(query), _heads_second(key), _heads_second(value))
    if packing.context is None:
        output_UHD = attend(rows, packing.documents, scoring)
    else:
        output_UHD = attend_over_slices(rows, packing, scoring)
    return output_UHD[None], None


def _heads_second(row: torch.Tensor) -> torch.Tensor:
    """[U, ·, D] of [1, ·, U, D], in autocast's dtype where that is on."""
    kind = row.device.type
    is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return row[0].transpose(0, 1).to(torch.get_autocast_dtype(kind) if is_cast else row.dtype)


def _beyond(module: torch.nn.Module, attention_mask: torch.Tensor | None, others: dict[str, Any]) -> str | None:
    """Options of the call that are not computed."""
    if attention_mask is not None:
        return "a mask"
    is_causal = others.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        return "attention to later units"
    given = {name: others.get(name) for name in REFUSED}
    return next((REFUSED[name] for name, value in given.items() if isinstance(value, torch.Tensor) or value), None)


AttentionInterface.register(PACKED, packed_attention)


def attend_packed(module: PreTrainedModel) -> None:
    """Let the text of a model attend within packed documents, and its towers to all of what they are shown."""
    attend_with(module, PACKED, "sdpa")


def attend_with(module: Any, name: str, towers: str | None = None) -> None:
    """Let the text of a model attend by a function of transformers' interface, and towers by another, if not as now."""
    text = module.config.get_text_config()
    names = () if text is module.config else module.config.sub_configs
    parts = {part: config for part in names if (config := getattr(module.config, part, None)) is not None}
    kinds = {
        part: name if config is text else towers or config._attn_implementation  # noqa: SLF001 - as below
        for part, config in parts.items()
    }
    module.set_attn_implementation({"": name, **kinds} if kinds else name)


def is_packed(module: PreTrainedModel) -> bool:
    """Tell whether the text of a model attends within packed documents."""
    return module.config.get_text_config()._attn_implementation == PACKED  # type: ignore[no-any-return]  # noqa: SLF001 - no public way to read it
