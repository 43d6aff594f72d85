"""What a token model should say: transformers' own forward of each sequence alone, from the exported files.

Shape legend: U units of a sequence, N decisions of it, V vocabulary.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from cosmos_core.models.tokens import values
from cosmos_core.protocols import Decided, Model
from cosmos_core.types import Payload


def decisions(model: Model, module: torch.nn.Module, payloads: Sequence[Payload], temperature: float) -> list[Decided]:
    """Export the model, load it back with transformers in float32, and evaluate each payload by itself."""
    with tempfile.TemporaryDirectory() as folder:
        model.export(module, Path(folder))
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [_decide(theirs, payload, temperature) for payload in payloads]


def _decide(theirs: Any, payload: Payload, temperature: float) -> Decided:
    prompt, completion = (torch.tensor(values(payload, name).tolist()) for name in ("prompt", "completion"))
    logits_UV = theirs(input_ids=torch.cat([prompt, completion]).long()[None], use_cache=False).logits[0]
    # The last unit predicts nothing; the first decision is taken at the last unit of the prompt.
    logits_NV = logits_UV[len(prompt) - 1 : -1].float() / temperature
    logprobs_NV = logits_NV.log_softmax(-1)
    return Decided(
        logprobs_N=logprobs_NV.gather(1, completion.long()[:, None])[:, 0],
        entropy_N=-(logprobs_NV.exp() * logprobs_NV).nan_to_num(0.0).sum(-1),
    )
