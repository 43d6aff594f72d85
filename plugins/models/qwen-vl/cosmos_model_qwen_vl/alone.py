"""A sequence by itself, through transformers' own forward: what packed rows are compared with.

Shape legend: U units of the sequence, V vocabulary, M patches, W values of one.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from cosmos_core.models import values
from cosmos_core.types import Payload
from cosmos_model_qwen_vl.model import QwenVLModel
from cosmos_model_qwen_vl.row import PATCHES


def own_copy(module: Any) -> Any:
    """A copy of a module that attends as transformers has it."""
    alone = copy.deepcopy(module)
    alone.set_attn_implementation("sdpa")
    return alone


def own_logits(alone: Any, model: QwenVLModel, payload: Payload) -> torch.Tensor:
    """Logits [U, V] of a prompt and its completion, images and videos given apart, as transformers takes them.

    Args:
        alone: From `own_copy`, or loaded by transformers.
        model: Whose conventions the payload follows.
        payload: One sequence.
    """
    logits_UV: torch.Tensor = alone(**own_inputs(model, payload), use_cache=False).logits[0]
    return logits_UV


def own_inputs(model: QwenVLModel, payload: Payload) -> dict[str, Any]:
    """Arguments of transformers' own forward and `generate` for a prompt, and its completion if there is one."""
    names = [name for name in ("prompt", "completion") if name in payload.arrays]
    prompt_P, *completion = (torch.from_numpy(values(payload, name).copy()).long() for name in names)
    tokens_U = torch.cat([prompt_P, *completion])
    if PATCHES not in payload.arrays:
        return {"input_ids": tokens_U[None]}
    kinds_P = torch.from_numpy(model.vision.tokens.kinds(prompt_P.numpy()))
    kinds_U = torch.cat([kinds_P, torch.zeros_like(tokens_U[len(kinds_P) :])])
    shown = [each.inputs for each in model.shown(payload)]
    names = [name for inputs in shown for name in inputs]
    given = {name: torch.cat([inputs[name] for inputs in shown if name in inputs]) for name in names}
    return {"input_ids": tokens_U[None], "mm_token_type_ids": kinds_U[None], **given}
