"""Images beside tokens: what a checkpoint's processor makes of them, in payloads, packed rows and positions (M-RoPE).

transformers' processors need torchvision for videos only; here they are made without that part. A row is to the model
as one text with the images of all its documents. So a processor is asked once what it makes of two images of different
sizes, apart and together, and each of its arrays is joined in the way that gives the same.

A payload with images has more arrays: `kinds` int64 [P or more], 0 for text, and those of a processor, `media.…`. A row
with images has `told` int64 [U], its tokens without placeholders that stand for nothing (a policy may sample one), and
the processor's arrays of all its documents, joined. Positions are counted by the model's own class of transformers.

Source of positions over several axes: arXiv:2409.12191, section 2.1.

Shape legend: U units of a packed row or a sequence, P units of a prompt, A axes.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import torch
from transformers import MODEL_MAPPING, AutoProcessor, PretrainedConfig, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING, processor_class_from_name
from transformers.utils import cached_file

from cosmos_core.errors import DataError, PluginIncompatibleError
from cosmos_core.models.packing import PAD_TOKEN
from cosmos_core.models.tokenizer import default_template
from cosmos_core.models.tokens import KINDS, array_of, tokens_payload, values, view
from cosmos_core.models.weights.loading import LIBRARY_ERRORS, first_line
from cosmos_core.protocols import MicroBatch
from cosmos_core.types import JSON, Payload

if TYPE_CHECKING:
    from PIL import Image

Arrays: TypeAlias = Mapping[str, npt.NDArray[np.generic]]
"""What a processor makes of images, by name."""


def find_joins(first: Arrays, second: Arrays, both: Arrays, name: str) -> Mapping[str, int]:
    """The dim along which each array is joined (see `join`), told from those of two images, apart and in one text.

    Raises:
        PluginIncompatibleError: An array of the two is not that of each, joined.
    """
    found = {}
    for key, expected in both.items():
        parts = [first[key], second[key]]
        dims = [dim for dim in range(expected.ndim) if np.array_equal(join(parts, dim), expected)]
        if not dims:
            raise PluginIncompatibleError(
                f"{name} makes {key!r} of shape {expected.shape} of two images, and of each alone "
                f"{parts[0].shape} and {parts[1].shape}: that is not theirs side by side, so rows cannot be packed"
            )
        found[key] = dims[0]
    return found


def join(parts: Sequence[npt.NDArray[np.generic]], dim: int) -> npt.NDArray[np.generic]:
    """Arrays along a dim, filled up with zeros at the end of the others."""
    sizes = np.max([part.shape for part in parts], axis=0)
    lacks = [[0 if at == dim else sizes[at] - own for at, own in enumerate(part.shape)] for part in parts]
    filled = [np.pad(part, [(0, lack) for lack in lacking]) for part, lacking in zip(parts, lacks, strict=True)]
    return np.concatenate(filled, axis=dim)


REQUIRED: Final = ("processor_config.json", "preprocessor_config.json")
"""Of these a checkpoint with a processor of images has one at least."""
_VIDEOS: Final = "video_processor"
_OF_UNITS: Final = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels")
"""What processors give for each token."""


@attrs.frozen(kw_only=True, eq=False)
class Processed:
    """A text with its images: tokens, their kinds (0 is text), arrays of the images, and all as a forward takes it."""

    ids: Sequence[int]
    kinds: npt.NDArray[np.int64]
    arrays: Arrays
    given: Mapping[str, torch.Tensor]


class Processor:
    """The processor of a checkpoint: makes tokens and arrays of texts and images."""

    def __init__(self, own: Any, settings: Mapping[str, JSON]) -> None:
        self.own: Final = own
        self.settings: Final = settings

    @staticmethod
    def load(
        path: str, config: PretrainedConfig, settings: Mapping[str, JSON], *, trust_remote_code: bool
    ) -> Processor:
        """The processor of a checkpoint."""
        try:
            own = _load(path, config, trust_remote_code=trust_remote_code)
        except LIBRARY_ERRORS as error:
            raise DataError(f"model.path: no usable processor of images at {path!r}: {first_line(error)}") from error
        if not isinstance(own, ProcessorMixin) or getattr(own, "image_processor", None) is None:
            raise DataError(f"model.path: {path!r} has no processor of images ({type(own).__name__})")
        return Processor(own, settings)

    @property
    def image_token(self) -> str:
        """The token that stands in a text for an image."""
        token: str | None = getattr(self.own, "image_token", None)
        if token is None:
            raise PluginIncompatibleError(f"{type(self.own).__name__} has no token for images, so none can be placed")
        return token

    @property
    def chat_template(self) -> str | None:
        """The Jinja template of chats, whose contents are lists of parts."""
        return default_template(self.own.chat_template)

    @cached_property
    def joins(self) -> Mapping[str, int]:
        """The dim along which each array is joined in a row."""
        images = example_images()
        parts = images[:1], images[1:], images
        first, second, both = (self(self.image_token * len(shown), shown).arrays for shown in parts)
        return find_joins(first, second, both, type(self.own).__name__)

    def __call__(self, text: str, images: Sequence[Image.Image], *, add_special_tokens: bool = False) -> Processed:
        """Process a text with its images."""
        found = text.count(self.image_token)
        if found != len(images):
            raise DataError(
                f"the prompt's text has {self.image_token!r} {found} times, for {len(images)} images; texts may not "
                "contain it: mark places with <image>"
            )
        try:
            made = self.own(
                text=[text],
                images=[list(images)],
                return_tensors="np",
                add_special_tokens=add_special_tokens,
                return_mm_token_type_ids=True,
                images_kwargs=dict(self.settings),
            )
        except (*LIBRARY_ERRORS, StopIteration) as error:
            raise DataError(f"{type(self.own).__name__} fails on this prompt: {first_line(error)}") from error
        ids = made["input_ids"][0].tolist()
        kinds = made["mm_token_type_ids"] if "mm_token_type_ids" in made else self.own.create_mm_token_type_ids([ids])
        arrays = {name: _plain(value) for name, value in made.items() if name not in _OF_UNITS}
        return Processed(
            ids=ids,
            kinds=np.asarray(kinds[0], dtype=np.int64),
            arrays=arrays,
            given={name: torch.as_tensor(value) for name, value in made.items()},
        )


def is_there(path: str) -> bool:
    """Tell whether a checkpoint has a processor of images, usable or not."""
    return any(_found(path, name) is not None for name in REQUIRED)


def copy_files(path: str, directory: Path) -> None:
    """Copy a checkpoint's processor into a folder that has a model and a tokenizer."""
    for name in (*REQUIRED, "video_preprocessor_config.json", "chat_template.json", "chat_template.jinja"):
        found = _found(path, name)
        if found is not None and not (directory / name).exists():
            (directory / name).write_bytes(found.read_bytes())


def example_images() -> list[Image.Image]:
    """Two images of different sizes, of noise."""
    from PIL import Image  # noqa: PLC0415 - of no use to models of text

    draw = np.random.default_rng(0)
    return [Image.fromarray(draw.integers(0, 255, (*size, 3), dtype=np.uint8)) for size in ((40, 72), (64, 24))]


def _load(path: str, config: PretrainedConfig, *, trust_remote_code: bool) -> Any:
    """Load as `AutoProcessor` does, with a class that takes no videos."""
    files = [_found(path, name) for name in (*REQUIRED, "tokenizer_config.json")]
    named = [json.loads(found.read_text(encoding="utf-8")) for found in files if found is not None]
    if trust_remote_code and any("AutoProcessor" in (each.get("auto_map") or {}) for each in named):
        return AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
    name = next((each["processor_class"] for each in named if each.get("processor_class")), None)
    own = PROCESSOR_MAPPING.get(type(config), None) if name is None else processor_class_from_name(name)
    if own is None:
        raise ValueError("it has none that transformers knows")
    return without_videos(own).from_pretrained(path)


def _found(path: str, name: str) -> Path | None:
    """A file of a checkpoint, of this machine or the hub; None where it has no such file."""
    found = cached_file(
        path,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
    return None if found is None else Path(found)


def without_videos(own: Any) -> Any:
    """The class, without what it has for videos: transformers makes that with torchvision only."""
    kept = [name for name in own.get_attributes() if name != _VIDEOS]
    if len(kept) == len(own.get_attributes()):
        return own

    def make(cls: Any, args: Any, settings: Any, /, **kwargs: Any) -> Any:
        return super(cls, cls).from_args_and_dict(args, settings, **{**kwargs, _VIDEOS: None})

    changed = {"get_attributes": staticmethod(lambda: kept), "from_args_and_dict": classmethod(make)}
    return type(own.__name__, (own,), {"__module__": own.__module__, **changed})


def _plain(value: Any) -> npt.NDArray[np.generic]:
    """An array of one of few dtypes."""
    array = np.asarray(value)
    return array.astype({"f": np.float32, "b": np.bool_}.get(array.dtype.kind, np.int64))


class OwnPositions:
    """The positions that a model gives the units of a sequence with images."""

    def __init__(self, model_class: Any, config: PretrainedConfig) -> None:
        # An instance that can count positions, which reads nothing but the config.
        self._model = model_class.__new__(model_class)
        torch.nn.Module.__init__(self._model)
        self._model.config = config
        self._takes = frozenset(inspect.signature(model_class.get_rope_index).parameters)

    @staticmethod
    def of_config(config: PretrainedConfig) -> OwnPositions | None:
        """Make those of a config's model; None where units have one position each, in order."""
        model_class = MODEL_MAPPING.get(type(config), None)
        return OwnPositions(model_class, config) if hasattr(model_class, "get_rope_index") else None

    @functools.cached_property
    def num_axes(self) -> int:
        """A."""
        none = torch.zeros(1, dtype=torch.int64)
        return len(self.of(none, none))

    def of(self, tokens_U: torch.Tensor, kinds_U: torch.Tensor, **given: Any) -> torch.Tensor:
        """Positions int64 [A, U] of a sequence; its kinds are 0 for text, 1 for images, 2 for videos.

        Raises:
            DataError: What the model is given of the images and videos does not fit the kinds.
        """
        known = {name: value for name, value in given.items() if name in self._takes}
        try:
            positions_A1U, _ = self._model.get_rope_index(tokens_U[None], mm_token_type_ids=kinds_U[None], **known)
        except (*LIBRARY_ERRORS, StopIteration) as error:
            raise DataError(f"what is seen does not fit its places in the sequence: {first_line(error)}") from error
        positions_AU: torch.Tensor = positions_A1U[:, 0]
        return positions_AU


MEDIA: Final = "media."
TOLD: Final = "told"


def with_seen(seen: Processed, completion: Sequence[int] | None) -> Payload:
    """A payload of a prompt with images, and of its completion if there is one."""
    payload = tokens_payload(seen.ids, completion)
    arrays = {f"{MEDIA}{name}": array_of(array) for name, array in seen.arrays.items()}
    return attrs.evolve(payload, arrays={**payload.arrays, KINDS: array_of(seen.kinds), **arrays})


def shows(payload: Payload) -> bool:
    """Tell whether a payload has images."""
    return any(map(is_media, payload.arrays))


def is_media(name: str) -> bool:
    """Tell whether an array of a payload is of its images."""
    return name == KINDS or name.startswith(MEDIA)


def lay_out(
    batch: MicroBatch, members: Sequence[Payload], joins: Mapping[str, int], own_positions: OwnPositions | None
) -> MicroBatch:
    """The micro-batch of these payloads, some with images, with what its documents see.

    `joins` has the dim along which each array of the processor is joined; `own_positions` is None where there is one
    axis. A DataError says that a payload with images lacks an array, or they do not fit together.
    """
    lengths = batch.inputs["lengths"].tolist()
    tokens = torch.split(batch.inputs["tokens"], lengths)
    kinds = [torch.zeros_like(each_U) for each_U in tokens]
    shown = {number: _whole(payload, joins) for number, payload in enumerate(members) if shows(payload)}
    for number, payload in shown.items():
        prompt = values(payload, KINDS)[: lengths[number]]
        kinds[number][: len(prompt)] = torch.from_numpy(prompt.copy())
    inputs = {TOLD: _told(batch.inputs["tokens"], torch.cat(kinds))}
    if own_positions is not None:
        # What fills a row up sees nothing, as text.
        counted = [torch.arange(length).expand(own_positions.num_axes, -1) for length in lengths]
        for number, payload in shown.items():
            media = {
                name.removeprefix(MEDIA): torch.from_numpy(view(payload, name).copy())
                for name in payload.arrays
                if name.startswith(MEDIA)
            }
            counted[number] = own_positions.of(tokens[number], kinds[number], **media)
        inputs["positions"] = torch.cat(counted, dim=1)
    for name, dim in joins.items():
        arrays = [view(payload, f"{MEDIA}{name}") for payload in shown.values()]
        inputs[f"{MEDIA}{name}"] = torch.from_numpy(join(arrays, dim))
    return attrs.evolve(batch, inputs={**batch.inputs, **inputs})


def _whole(payload: Payload, joins: Mapping[str, int]) -> Payload:
    wanted = {KINDS, *(f"{MEDIA}{name}" for name in joins)}
    if lost := sorted(wanted - payload.arrays.keys()):
        raise DataError(f"a payload with images lacks {', '.join(lost)}; it has {', '.join(payload.arrays)}")
    least, size = (len(values(payload, name)) for name in ("prompt", KINDS))
    most = least + (len(values(payload, "completion")) if "completion" in payload.arrays else 0)
    if not least <= size <= most:
        raise DataError(
            f"a payload with images has {KINDS} of {size} units, its prompt {least}, and all of it {most}; give one "
            "for each unit of the prompt, and of what follows up to the last that is seen"
        )
    return payload


def _told(tokens_U: torch.Tensor, kinds_U: torch.Tensor) -> torch.Tensor:
    placeholders = set(tokens_U[kinds_U != 0].tolist())
    other = next(token for token in itertools.count(PAD_TOKEN) if token not in placeholders)
    is_placeholder_U = torch.isin(tokens_U, torch.tensor(sorted(placeholders)))
    return tokens_U.masked_fill(is_placeholder_U & (kinds_U == 0), other)
