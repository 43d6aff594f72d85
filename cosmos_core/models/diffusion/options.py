"""Options that every world model has: what is generated, how prompts become embeddings, what demonstrations teach."""

from __future__ import annotations

from typing import Literal

import attrs
from attrs import validators as check

from cosmos_core.config import option


@attrs.frozen(kw_only=True)
class DiffusionOptions:
    """Options of rows, which become conditionings, and of demonstrations."""

    revision: str | None = option(
        None,
        help="Branch, tag or commit of the hub's repository, if model.path is one; left out: where it has a checkpoint "
        "of diffusers as far as the plugin knows, else its main branch.",
    )
    height: int = option(480, help="Pixels from top to bottom of what is generated.", validator=check.ge(1))
    width: int = option(832, help="Pixels from left to right.", validator=check.ge(1))
    num_frames: int = option(81, help="Frames of a video; 1 for images.", validator=check.ge(1))
    fps: float = option(16.0, help="Frames a second, of what is generated and imitated.", validator=check.gt(0.0))
    text: Literal["encoder", "table"] = option(
        "encoder",
        help="Where embeddings of captions come from: `encoder`, the checkpoint's own; `table`, drawn from a hash of "
        "each word, for tiny models. A row's `metadata.text_embedding` (a safetensors file) comes first.",
    )
    encoders: Literal["device", "cpu"] = option(
        "device",
        help="Where the checkpoint's encoders of text and images work: on the `device` of the weights, beside them, or "
        "on the `cpu`, where a large one takes seconds a row.",
    )
    encoder_precision: Literal["fp32", "bf16"] | None = option(
        None, help="What they compute in; left out: as their weights are stored, which for some families is float32."
    )
    text_length: int = option(
        512, help="Tokens of the text that the model is shown; shorter ones are filled up.", validator=check.ge(1)
    )
    negative_prompt: str | None = option(
        None, help="What classifier-free guidance leads away from; left out: as in the family's own pipeline."
    )
    negative_embedding: str | None = option(
        None, help="A safetensors file with the embedding of the negative prompt, in place of `negative_prompt`."
    )
    max_media_bytes: int = option(1 << 30, help="Largest file of an image or a video.", validator=check.ge(1))
    max_media_pixels: int = option(
        1 << 24, help="Most pixels of one frame of an image or a video that is read.", validator=check.ge(1)
    )
    regressions: int = option(
        1, help="At how many times a demonstration is learned each time that it is seen.", validator=check.ge(1)
    )
    times: Literal["logit-normal", "uniform", "edm"] = option(
        "logit-normal", help="How these times are drawn: `logit-normal`, `uniform`, or `edm` (log-normal noise levels)."
    )
    times_mean: float = option(0.0, help="Mean of the normal that `logit-normal` and `edm` draw from.")
    times_std: float = option(1.0, help="Its standard deviation.", validator=check.gt(0.0))
    times_shift: float = option(
        1.0, help="s of t' = s t / (1 + (s - 1) t), which moves times towards noise.", validator=check.gt(0.0)
    )
