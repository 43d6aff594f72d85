"""The log-probs that vLLM computes at start, compared with the model's own evaluation under the same weights."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Final

import attrs
import numpy as np
import torch
from PIL import Image

from cosmos_core.errors import DataError, EngineError
from cosmos_core.protocols import EngineContext, Model
from cosmos_core.protocols.vision import VisionModel
from cosmos_core.rollout.serving.scoring import scoring_inputs
from cosmos_core.types import Array, Payload, Prompt
from cosmos_engine_vllm.backend import Backend
from cosmos_engine_vllm.media import Media

_UNITS: Final = 12
_LIMITS: Final = {torch.float32: 1e-3}
_LOW_PRECISION_LIMIT: Final = 0.1
"""Mean difference of log-probs: rounding gives at most 0.02 in bfloat16."""
_PICTURE_SIZE: Final = (64, 32)
"""Width and height, not alike: an axis that is taken for the other shows."""


@torch.no_grad()
def check(
    module: torch.nn.Module,
    context: EngineContext,
    backend: Backend,
    media: Media,
    *,
    num_tokens: int,
    verify: bool = True,
    when: str = "",
) -> None:
    """Let vLLM evaluate a sequence of text, and one with a picture if the model sees any, and compare.

    Args:
        module: The model, with the weights that vLLM has.
        context: Of the engine.
        backend: vLLM.
        media: Turns what prompts show into what it takes.
        num_tokens: Token ids below it can be evaluated.
        verify: Whether to compare; without, text is evaluated only.
        when: How an error begins, for people.

    Raises:
        EngineError: vLLM cannot compute the model, or computes something else.
    """
    for what, payload in _samples(context.model, min(_UNITS, context.context_length), num_tokens):
        if payload.arrays["prompt"].shape[0] + payload.arrays["completion"].shape[0] > context.context_length:
            continue
        (given,) = scoring_inputs(
            [payload], context.model, context_length=context.context_length, vocabulary=num_tokens
        )
        shows = None if given.conditioning is None else media.enter(given.prompt, given.conditioning, f"{what}, tried")
        found = torch.tensor(backend.probe(given.tokens, shows)[given.num_given - 1 :])
        if not verify:
            return
        (batch,) = context.model.pack([payload], budget=len(given.tokens))
        expected = context.model.decide(module, batch, temperature=1.0).logprobs_N
        difference = (found - expected).abs().mean().item()
        limit = _LIMITS.get(context.dtype, _LOW_PRECISION_LIMIT)
        if not difference <= limit:
            raise EngineError(
                f"{when}vLLM's {backend.name} gives other log-probs of {what} than {type(module).__name__} with the "
                f"same weights (mean difference {difference:.2g}, allowed {limit:g}): it computes otherwise, or holds "
                "weights in a form of its own; use the engine 'embedded'"
            )


def _samples(model: Model, size: int, num_tokens: int) -> Iterator[tuple[str, Payload]]:
    ids = np.linspace(0, num_tokens - 1, size, dtype=np.int32)
    yield "text", Payload(kind="tokens", arrays={"prompt": _ids(ids[:1]), "completion": _ids(ids[1:])})
    if not isinstance(model, VisionModel) or model.shown is None:
        return
    try:
        prompt = model.encode(Prompt(text="What is it?", media=(_picture(),)))
    except DataError:
        # It sees videos alone, or larger pictures: then its own prompts are the first.
        return
    yield "a picture", attrs.evolve(prompt, arrays={**prompt.arrays, "completion": _ids(ids[1:])})


def _picture() -> str:
    """A picture without symmetry, as a location of its own."""
    width, height = _PICTURE_SIZE
    across, down = np.meshgrid(np.arange(width), np.arange(height))
    colours = np.stack([across * 4, down * 8, (across + down) % 7 * 36], axis=-1).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(colours).save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _ids(values: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> Array:
    return Array(dtype="int32", shape=values.shape, data=values.tobytes())
