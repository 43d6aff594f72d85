"""A sequence by itself, through transformers' own forward: what packed rows are compared with.

Shape legend: U units of the sequence, V vocabulary, M patches, W values of one.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from cosmos_core.policy.modeling import values
from cosmos_core.policy.modeling.tokens import view
from cosmos_core.types import Payload
from cosmos_model_qwen_vl.model import QwenVLModel
from cosmos_model_qwen_vl.row import GRIDS, PATCHES, STEPS


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
    """What transformers' own forward and `generate` take for a prompt, and its completion if there is one."""
    names = [name for name in ("prompt", "completion") if name in payload.arrays]
    prompt_P, *completion = (torch.from_numpy(values(payload, name).copy()).long() for name in names)
    tokens_U = torch.cat([prompt_P, *completion])
    if PATCHES not in payload.arrays:
        return {"input_ids": tokens_U[None]}
    grids_n3 = torch.from_numpy(view(payload, GRIDS).copy()).long()
    steps_n = torch.from_numpy(values(payload, STEPS).copy())
    patches_MW = model.sight.patcher.normalise(torch.from_numpy(view(payload, PATCHES).copy()))
    parts = torch.split(patches_MW, grids_n3.prod(1).tolist())
    kinds_P = torch.from_numpy(model.sight.tokens.kinds(prompt_P.numpy()))
    kinds_U = torch.cat([kinds_P, torch.zeros_like(tokens_U[len(kinds_P) :])])
    given: dict[str, Any] = {"input_ids": tokens_U[None], "mm_token_type_ids": kinds_U[None]}
    for suffix, of, chosen_n in (("", "image", steps_n == 0), ("_videos", "video", steps_n > 0)):
        if chosen_n.any():
            given[f"pixel_values{suffix}"] = torch.cat([p for p, is_it in zip(parts, chosen_n, strict=True) if is_it])
            given[f"{of}_grid_thw"] = grids_n3[chosen_n]
    if (steps_n > 0).any() and model.config.model_type == "qwen2_5_vl":
        given["second_per_grid_ts"] = steps_n[steps_n > 0]
    return given
