"""Any vision-language model of transformers that puts what it sees in the places of placeholder tokens.

Its checkpoint's processor makes tokens and arrays of a prompt and its images; its own forward makes embeddings of them
(`decoder`). Whether packing them gives what the model gives is tried, before the first prompt with images, on a
small model of the same make.

Shape legend: U units of a packed row.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from cosmos_core.config import option
from cosmos_core.errors import ConfigError
from cosmos_core.models.packing import Row
from cosmos_core.models.parallel.forwards import layout_of
from cosmos_core.models.small import compare, own_logits, verify_tiny
from cosmos_core.models.tokenizer import FILE as TOKENIZER_FILE
from cosmos_core.models.tokenizer import PROBE, HuggingFaceOptions, TextEncoder
from cosmos_core.models.tokens import KINDS, tokens_payload, values, view, with_completion
from cosmos_core.models.vision.images import (
    IMAGE_MARK,
    MARK,
    SEEN,
    filled,
    load_image,
    marked_parts,
    shows_in_turns,
    text_parts,
    with_marks,
)
from cosmos_core.models.vision.model import decoder_inputs
from cosmos_core.models.vision.rows import (
    MEDIA,
    REQUIRED,
    TOLD,
    OwnPositions,
    Processed,
    Processor,
    copy_files,
    example_images,
    is_media,
    is_there,
    join,
    lay_out,
    shows,
    with_seen,
)
from cosmos_core.models.vision.turns import DialogueVisionModel, SeenImages, refuse_spelt
from cosmos_core.protocols import MicroBatch
from cosmos_core.types import JSON, Payload, Prompt

if TYPE_CHECKING:
    from PIL import Image


@attrs.frozen(kw_only=True)
class GenericOptions(HuggingFaceOptions):
    """Options of the tokenizer, of chats and of images."""

    image_options: Mapping[str, JSON] = option(
        factory=dict, help="Settings of the checkpoint's image processor to change, such as `size` or `max_pixels`."
    )


class ProcessorTextEncoder(TextEncoder):
    """Encodes texts with the chat template of a processor, which takes turns as lists of parts."""

    model: GenericVisionModel

    @property
    def chat_template(self) -> str | None:
        """The Jinja template of chats: the recipe's, else the processor's, else the tokenizer's."""
        processor = None if self.model.options.chat_template is not None else self.model.processor
        own = None if processor is None else processor.chat_template
        return super().chat_template if own is None else own

    @cached_property
    def takes_parts(self) -> bool:
        """Tell whether the template wants turns as lists of parts; one that fails on either is taken to."""
        said = [self.written([{"role": "user", "content": content}]) for content in (text_parts(PROBE), PROBE)]
        # Some write a list as it is.
        as_parts, as_text = (PROBE in each and "'type'" not in each for each in said)
        return as_parts or not as_text

    def chat_turns(self, prompt: Prompt) -> list[dict[str, Any]]:
        """The turns of a chat, as lists of parts if the template takes those."""
        turns = super().chat_turns(prompt)
        if not self.takes_parts:
            return turns
        mark = MARK if prompt.media else _SEEN
        cut = [marked_parts(turn["content"], mark) or text_parts("") for turn in turns]
        return [{**turn, "content": parts} for turn, parts in zip(turns, cut, strict=True)]

    def with_images(self, prompt: Prompt, image_token: str) -> str:
        """The text of a prompt with images, a placeholder in the place of each."""
        marked = with_marks(prompt, [IMAGE_MARK] * len(prompt.media))
        is_chat = not isinstance(prompt.text, str)
        # A template that takes parts writes the placeholders itself.
        written = marked if is_chat and self.takes_parts else filled(marked, [image_token] * len(prompt.media))
        return self.chat_text(written) if is_chat else str(written.text)


_SEEN: Final = re.compile(SEEN)


class _Images(SeenImages):
    """Images of turns, by the processor."""

    def __init__(self, text: TextEncoder, processor: Processor | None, images: Sequence[Image.Image]) -> None:
        self._text, self._processor, self._images = text, processor, images
        self._seen: list[Processed] = []
        self._kinds = np.zeros(0, np.int64)
        self.number = len(images)

    def joined(self, text: str, spelt: Mapping[str, str]) -> list[int]:
        """Pieces with images are the processor's."""
        words, processor = self._text.words, self._processor
        if processor is None:
            return words.joined(text, spelt)
        token, images = processor.image_token, iter(self._images)
        text, self._seen = text.replace(SEEN, token), []
        self.refuse_others(text.count(token))
        kinds: dict[int, npt.NDArray[np.int64]] = {}

        def encoded(piece: str) -> list[int]:
            own = list(itertools.islice(images, piece.count(token)))
            if not own:
                return words.joined(piece, {})
            self._seen.append(processor(piece, own))
            ids = list(self._seen[-1].ids)
            kinds[id(ids)] = self._seen[-1].kinds
            return ids

        pieces = list(words.pieces(text, spelt, encoded))
        self._kinds = np.concatenate([kinds.get(id(ids), np.zeros(len(ids), np.int64)) for ids in pieces])
        return [own for ids in pieces for own in ids]

    def payload(self, ids: Sequence[int]) -> Payload:
        """With what the processor made; the ids are the newest that were joined, or the end of them."""
        if self._processor is None or not self._seen:
            return tokens_payload(ids)
        arrays = {
            name: join([seen.arrays[name] for seen in self._seen], dim) for name, dim in self._processor.joins.items()
        }
        kinds = self._kinds[len(self._kinds) - len(ids) :]
        return with_seen(Processed(ids=ids, kinds=kinds, arrays=arrays, given={}), None)


class GenericVisionModel(DialogueVisionModel):
    """A vision-language model of transformers, images through its checkpoint's processor."""

    options: GenericOptions
    text: ProcessorTextEncoder

    def make_text_encoder(self) -> ProcessorTextEncoder:
        """Chats are written as the processor wants them."""
        return ProcessorTextEncoder(self)

    def prepare(self, corpus: Iterable[str], tokenizer: Mapping[str, Any]) -> None:
        """See `VisionLanguageModel.prepare`; beside a tokenizer made locally there are no images."""
        super().prepare(corpus, tokenizer)
        for name in ("processor", "_checked_processor", "_own_positions"):
            self.__dict__.pop(name, None)

    def encode(self, prompt: Prompt) -> Payload:
        """The prompt with placeholders for its images, and what the processor makes of those."""
        return self._encoded(prompt, None)

    def encode_demonstration(self, prompt: Prompt) -> Payload:
        """The same, with its demonstration (see `HuggingFaceModel.encode_demonstration`)."""
        return self._encoded(prompt, self.text.demonstration_ids(prompt))

    def pack(self, payloads: Sequence[Payload], **limits: Any) -> list[MicroBatch]:
        """Pack payloads (see `HuggingFaceModel.pack`), each row with what its documents see (see `rows`)."""
        batches = super().pack(payloads, **limits)
        return [self._with_seen(batch, payloads) for batch in batches]

    def text_positions(self, lengths: Sequence[int]) -> torch.Tensor:
        """int64 [U] or [axes, U], the positions of documents of text of these lengths."""
        positions = super().text_positions(lengths)
        return positions if self._own_positions is None else positions.expand(self._own_positions.num_axes, -1)

    def is_media(self, name: str) -> bool:
        """Tell whether an array of a payload is of its images (see `rows`)."""
        return is_media(name)

    def embed(self, module: torch.nn.Module, row: Row) -> dict[str, Any]:
        """Embeddings of the tokens, with what is seen in their places."""
        media = {name.removeprefix(MEDIA): value for name, value in row.inputs.items() if name.startswith(MEDIA)}
        if not media:
            return super().embed(module, row)
        inputs, layout = row.inputs, layout_of(module)
        entered = decoder_inputs(module, inputs["tokens"], inputs[TOLD], inputs["positions"], media)
        is_split = layout is not None and layout.sequence_parallel and layout.mesh.size("tp") > 1
        return entered.part(row.packing.bounds, layout.mesh.group("tp") if layout is not None and is_split else None)

    @cached_property
    def _own_positions(self) -> OwnPositions | None:
        return OwnPositions.of_config(self.config)

    @property
    def _processor_path(self) -> str | None:
        """The checkpoint whose processor is in use: none beside a tokenizer made locally."""
        return None if (self.context.assets / TOKENIZER_FILE).is_file() else self.context.path

    @cached_property
    def processor(self) -> Processor | None:
        """The processor of the checkpoint; None where there is none: text needs none."""
        path, trust = self._processor_path, self.context.trust_remote_code
        if path is None or not is_there(path):
            return None
        return Processor.load(path, self.config, self.options.image_options, trust_remote_code=trust)

    @cached_property
    def _checked_processor(self) -> Processor:
        """The processor, once a small model has shown that what it makes can be packed."""
        processor = self.processor
        if processor is None:
            raise ConfigError(
                "model: the rows show images, and only the processor of a checkpoint makes tokens of them: give "
                f"model.path, a checkpoint with {' or '.join(REQUIRED)}, without [model.tokenizer], or take a model "
                "plugin that makes a processor of its own"
            )
        verify_tiny(self._blueprint(), lambda small: self._verify_packed_images(small, processor), keeps_ids=True)
        return processor

    def look(self, media: Sequence[str]) -> SeenImages:
        """Images of turns; without any no processor is needed."""
        processor = self._checked_processor if media else None
        return _Images(self.text, processor, [load_image(location) for location in media])

    def marks(self, media: Sequence[str]) -> list[str]:
        """All are images."""
        return [IMAGE_MARK] * len(media)

    def kinds(self, payload: Payload) -> npt.NDArray[np.generic]:
        """The kinds that the processor told."""
        return values(payload, KINDS)

    def joined_media(self, payloads: Sequence[Payload]) -> Mapping[str, npt.NDArray[np.generic]]:
        """Arrays of the processor."""
        names = {f"{MEDIA}{name}": dim for name, dim in self._checked_processor.joins.items()}
        return {name: join([view(payload, name) for payload in payloads], dim) for name, dim in names.items()}

    def _encoded(self, prompt: Prompt, completion: Sequence[int] | None) -> Payload:
        if shows_in_turns(prompt):
            return with_completion(self.encode_shown(prompt), completion)
        if not prompt.media:
            return tokens_payload(self.text.prompt_ids(prompt), completion)
        refuse_spelt(self.text, prompt)
        processor = self._checked_processor
        images = [load_image(location) for location in prompt.media]
        text = self.text.with_images(prompt, processor.image_token)
        adds = self.options.add_special_tokens and isinstance(prompt.text, str)
        return with_seen(processor(text, images, add_special_tokens=adds), completion)

    def _with_seen(self, batch: MicroBatch, payloads: Sequence[Payload]) -> MicroBatch:
        members = [payloads[index] for index in batch.sequences]
        if not any(map(shows, members)):
            positions = self.text_positions(batch.inputs["lengths"].tolist())
            return attrs.evolve(batch, inputs={**batch.inputs, "positions": positions})
        assert self.processor is not None, "a payload with images comes of a processor"
        return lay_out(batch, members, self.processor.joins, self._own_positions)

    @torch.no_grad()
    def _verify_packed_images(self, small: PreTrainedModel, processor: Processor) -> None:
        """Compare packed documents with images with transformers' own forward of each."""
        first, second = example_images()
        image, end = processor.image_token, [self.text.stop_id()]
        seen = [processor(f"1 {image} 2 {image}", [second, first]), processor(f"{image} 3", [first])]
        (batch,) = self.pack([with_seen(each, end) for each in seen], budget=sum(len(each.ids) for each in seen))
        given = [{k: v for k, v in seen[index].given.items() if k != "labels"} for index in batch.sequences]
        compare(
            small,
            self.logits(small, self.hidden(small, self._row(small, batch))),
            own_logits(small, given),
            "images of this model need more than causal attention over what is seen in the places of tokens: train it "
            "on text, or give it a model plugin of its own",
        )

    def write_companions(self, directory: Path) -> None:
        """Write what goes with weights, the processor included."""
        super().write_companions(directory)
        if self._processor_path is not None:
            copy_files(self._processor_path, directory)
