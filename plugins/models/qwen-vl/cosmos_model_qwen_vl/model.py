"""Qwen2.5-VL and Qwen3-VL: what is seen, where it stands in a packed row, and how it enters the text backbone.

Shape legend: U units of this process's slice of a packed row, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PretrainedConfig

from cosmos_core.errors import DataError
from cosmos_core.models import VisionLanguageModel
from cosmos_core.models.packing import Row
from cosmos_core.models.parallel.forwards import layout_of
from cosmos_core.protocols import MicroBatch
from cosmos_core.protocols.vision import Shown
from cosmos_core.types import Payload, Prompt
from cosmos_model_qwen_vl.family import FAMILIES, IMAGE, VIDEO, VISION_END, VISION_START
from cosmos_model_qwen_vl.options import QwenVLOptions
from cosmos_model_qwen_vl.patches import Seen
from cosmos_model_qwen_vl.row import ARRAYS, lay_out, with_seen
from cosmos_model_qwen_vl.showing import show
from cosmos_model_qwen_vl.tower import look
from cosmos_model_qwen_vl.vision import Vision, place


class QwenVLModel(VisionLanguageModel):
    """A Qwen vision-language model."""

    model_types: ClassVar[frozenset[str] | None] = frozenset(FAMILIES)
    turn_end: ClassVar[str | None] = "<|im_end|>"
    stop_tokens: ClassVar[tuple[str, ...]] = ("<|im_end|>", "<|endoftext|>")
    turn_template: ClassVar[str | None] = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    special_tokens: ClassVar[Mapping[str, str | None]] = {
        "<|im_start|>": None,
        "<|im_end|>": None,
        VISION_START: "vision_start_token_id",
        VISION_END: "vision_end_token_id",
        IMAGE: "image_token_id",
        VIDEO: "video_token_id",
    }

    options: QwenVLOptions

    @cached_property
    def vision(self) -> Vision:
        """The encoder of media into patches and positions.

        Raises:
            DataError: The checkpoint's image processor cannot be read.
        """
        return Vision.of(self.config, self.context.path, self.options)

    def prepare(self, corpus: Iterable[str], tokenizer: Mapping[str, Any]) -> None:
        """See `VisionLanguageModel.prepare`."""
        super().prepare(corpus, tokenizer)
        self.__dict__.pop("vision", None)

    def encode(self, prompt: Prompt) -> Payload:
        """The prompt with placeholders for what is seen, and the patches of that.

        Raises:
            DataError: The prompt cannot be encoded, or its media cannot be read.
        """
        seen = self._see(prompt)
        return with_seen(super().encode(place(prompt, seen)), seen, self.vision.tokens)

    def encode_demonstration(self, prompt: Prompt) -> Payload:
        """The same, with its demonstration (see `HuggingFaceModel.encode_demonstration`).

        Raises:
            DataError: The prompt has no demonstration, or cannot be encoded, or its media cannot be read.
        """
        if prompt.demonstration is None:
            raise DataError("the row has no demonstration, and the algorithm learns from demonstrations")
        seen = self._see(prompt)
        return with_seen(super().encode_demonstration(place(prompt, seen)), seen, self.vision.tokens)

    def _see(self, prompt: Prompt) -> list[Seen]:
        if prompt.media:
            self.text.refuse_spelt(prompt)
        return self.vision.see(prompt.media)

    def pack(
        self, payloads: Sequence[Payload], *, budget: int, multiple: int = 1, is_uniform: bool = False
    ) -> list[MicroBatch]:
        """Pack payloads (see `HuggingFaceModel.pack`), each row with its patches and its positions in three dims."""
        batches = super().pack(payloads, budget=budget, multiple=multiple, is_uniform=is_uniform)
        return [lay_out(batch, payloads, self.vision.tokens, self.vision.rope) for batch in batches]

    def text_positions(self, lengths: Sequence[int]) -> torch.Tensor:
        """int64 [3, U], the positions of documents of text of these lengths."""
        return super().text_positions(lengths).expand(3, -1)

    def shown(self, prompt: Payload) -> Sequence[Shown]:
        """Images and videos of a prompt, one by one (see `cosmos_core.protocols.vision.VisionModel`).

        Raises:
            DataError: The payload has other patches than its grids and placeholders say.
        """
        return show(prompt, self.vision)

    def is_media(self, name: str) -> bool:
        """Tell whether an array of a payload is of what its prompt shows (see `cosmos_model_qwen_vl.row`)."""
        return name in ARRAYS

    def embed(self, module: torch.nn.Module, row: Row) -> dict[str, Any]:
        """Embeddings of the tokens, with what is seen in their places, and what deeper layers add to those."""
        features = look(module, row.inputs, self.vision.patcher)
        if features is None:
            return super().embed(module, row)
        embeddings_UD: torch.Tensor = module.get_input_embeddings()(row.tokens_U[None])[0]  # type: ignore[operator]
        layout = layout_of(module)
        is_split = layout is not None and layout.sequence_parallel and layout.mesh.size("tp") > 1
        group = layout.mesh.group("tp") if layout is not None and is_split else None
        return features.enter(embeddings_UD, row.packing.bounds, group)

    def export(
        self, module: torch.nn.Module, directory: Path, *, dtype: torch.dtype | None = None
    ) -> Sequence[torch.dtype]:
        """Write safetensors, config, tokenizer and image processor: `AutoModelForImageTextToText` reads them."""
        written = super().export(module, directory, dtype=dtype)
        self.vision.save(directory)
        return written

    def find_config(self) -> PretrainedConfig:
        """The config, which says to others what transformers does unsaid."""
        config = super().find_config()
        family = FAMILIES.get(config.model_type)
        if family is not None and family.interleaves:
            config.text_config.rope_parameters["mrope_interleaved"] = True
        return config
