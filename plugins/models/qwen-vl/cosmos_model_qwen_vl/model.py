"""Qwen2.5-VL and Qwen3-VL: what is seen, where it stands in a packed row, and how it enters the text backbone.

Shape legend: U units of this process's slice of a packed row, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from transformers import PretrainedConfig

from cosmos_core.errors import DataError
from cosmos_core.models.packing import Row
from cosmos_core.models.parallel.forwards import layout_of
from cosmos_core.models.tokens import KINDS, tokens_payload, view, with_completion
from cosmos_core.models.vision.images import IMAGE_MARK, VIDEO_MARK, shows_in_turns
from cosmos_core.models.vision.turns import DialogueVisionModel, SeenImages, filled_marks, num_marks, refuse_spelt
from cosmos_core.protocols import MicroBatch
from cosmos_core.protocols.vision import Shown
from cosmos_core.types import Payload, Prompt
from cosmos_model_qwen_vl.family import FAMILIES, IMAGE, VIDEO, VISION_END, VISION_START
from cosmos_model_qwen_vl.options import QwenVLOptions
from cosmos_model_qwen_vl.patches import Seen
from cosmos_model_qwen_vl.row import ARRAYS, kinds_of, lay_out, with_seen
from cosmos_model_qwen_vl.showing import show
from cosmos_model_qwen_vl.tower import look
from cosmos_model_qwen_vl.vision import Vision, place


class _Images(SeenImages):
    """Images and videos of turns, as patches."""

    def __init__(self, model: QwenVLModel, seen: Sequence[Seen]) -> None:
        self._model, self._seen, self.number = model, seen, len(seen)

    def joined(self, text: str, spelt: Mapping[str, str]) -> list[int]:
        """Placeholders are written into the text: words in it spell none."""
        self.refuse_others(num_marks(text))
        return self._model.text.words.joined(filled_marks(text, [each.text for each in self._seen]), spelt)

    def payload(self, ids: Sequence[int]) -> Payload:
        """With the patches."""
        return with_seen(tokens_payload(ids), self._seen, self._model.vision.tokens)


class QwenVLModel(DialogueVisionModel):
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
        if shows_in_turns(prompt):
            return self.encode_shown(prompt)
        seen = self._see(prompt)
        return with_seen(super().encode(place(prompt, seen)), seen, self.vision.tokens)

    def encode_demonstration(self, prompt: Prompt) -> Payload:
        """The same, with its demonstration (see `HuggingFaceModel.encode_demonstration`).

        Raises:
            DataError: The prompt has no demonstration, or cannot be encoded, or its media cannot be read.
        """
        if prompt.demonstration is None:
            raise DataError("the row has no demonstration, and the algorithm learns from demonstrations")
        if shows_in_turns(prompt):
            return with_completion(self.encode_shown(prompt), self.text.demonstration_ids(prompt))
        seen = self._see(prompt)
        return with_seen(super().encode_demonstration(place(prompt, seen)), seen, self.vision.tokens)

    def look(self, media: Sequence[str]) -> SeenImages:
        """Images and videos of turns."""
        return _Images(self, self.vision.see(media))

    def marks(self, media: Sequence[str]) -> list[str]:
        """What each is."""
        return [VIDEO_MARK if each.step_s else IMAGE_MARK for each in self.vision.see(media)]

    def kinds(self, payload: Payload) -> npt.NDArray[np.generic]:
        """As said, else by the placeholders."""
        return kinds_of(payload, self.vision.tokens)

    def joined_media(self, payloads: Sequence[Payload]) -> Mapping[str, npt.NDArray[np.generic]]:
        """Patches, grids and times, one after another."""
        return {name: np.concatenate([view(payload, name) for payload in payloads]) for name in sorted(ARRAYS)}

    def _see(self, prompt: Prompt) -> list[Seen]:
        if prompt.media:
            refuse_spelt(self.text, prompt)
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
        return name in ARRAYS or name == KINDS

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
