"""Media of prompts, as vLLM takes them: made by the model plugin, placed where the payload's token ids have it.

vLLM would resize, cut and place images itself, with a tokenizer and a processor of the checkpoint, and other numbers.
Here it is given what its own processor would have made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import torch
from transformers import BatchFeature

from cosmos_core.errors import DataError, EngineError
from cosmos_core.protocols import Model
from cosmos_core.protocols.vision import Conditioning, Shown, VisionModel
from cosmos_core.types import Payload
from cosmos_engine_vllm.preflight import needs_one_process

_LOADER: Final = "vllm.model_executor.model_loader"
_INPUTS: Final = "vllm.multimodal.inputs"
_FACTORY: Final = "_processor_factory"


@attrs.frozen(kw_only=True, eq=False)
class ShownPrompt(Conditioning):
    """A prompt that shows something.

    Attributes:
        items: For each modality, what vLLM's model is called with for each image or video.
        places: For each of these, where it is in the prompt.
        digests: For each of these, the digest of its content.
    """

    items: Mapping[str, Sequence[object]]
    places: Mapping[str, Sequence[object]]
    digests: Mapping[str, Sequence[str]]


def entry(tokens: Sequence[int], shows: Conditioning | None, *, epoch: int) -> dict[str, object]:
    """A prompt as vLLM takes it.

    Args:
        tokens: Its ids, as they are; when it is scored, its completion's too.
        shows: From `Media.enter`; None for text.
        epoch: Of the weights: what was made of it under others is not looked up.
    """
    ids: dict[str, object] = {"prompt_token_ids": list(tokens), "cache_salt": f"epoch-{epoch}"}
    if shows is None:
        return {"type": "token", **ids}
    assert isinstance(shows, ShownPrompt)
    names = {kind: [f"{epoch}-{digest}" for digest in digests] for kind, digests in shows.digests.items()}
    return {
        "type": "multimodal",
        **ids,
        "mm_kwargs": shows.items,
        "mm_hashes": names,
        "mm_placeholders": shows.places,
    }


class Media:
    """Turns what prompts show into what a loaded vLLM takes."""

    def __init__(self, model: Model, processor: Any, positions: Any) -> None:
        """Remember who is asked.

        Args:
            model: The plugin's.
            processor: vLLM's for its model of that family; None if that sees nothing.
            positions: vLLM's model, where it counts positions on several rotary axes itself.
        """
        self._model: Final = model
        self._processor: Final = processor
        self._positions: Final = positions

    def enter(self, prompt: Payload, conditioning: Conditioning, where: str) -> ShownPrompt:
        """The input of vLLM for a prompt that holds more than token ids.

        Args:
            prompt: It.
            conditioning: How the model plugin has it enter.
            where: Whose it is, for errors.

        Raises:
            EngineError: vLLM's model sees nothing, or otherwise than the plugin's.
        """
        model = type(self._model).__name__
        shown_by = self._model.shown if isinstance(self._model, VisionModel) else None
        if self._processor is None or shown_by is None:
            reason = (
                f"vLLM has it as a model of text that {model} shows things to"
                if self._processor is None
                else f"{model} does not say what its prompts show (cosmos_core.protocols.vision.VisionModel.shown)"
            )
            raise EngineError(f"{where}: it shows images or videos, and {reason}; use the engine 'embedded'")
        try:
            shown = shown_by(prompt)
        except DataError as error:
            raise EngineError(f"{where}: {error}") from error
        made = self._made(shown, conditioning, where)
        self._check(made, prompt, where)
        return made

    def _made(self, shown: Sequence[Shown], conditioning: Conditioning, where: str) -> ShownPrompt:
        inputs = importlib.import_module(_INPUTS)
        items: dict[str, list[object]] = {}
        places: dict[str, list[object]] = {}
        digests: dict[str, list[str]] = {}
        for each in shown:
            fields = self._processor._get_mm_fields_config(BatchFeature(each.inputs), {})  # noqa: SLF001 - what vLLM's processors override
            if foreign := sorted(each.inputs.keys() - fields.keys()):
                raise EngineError(
                    f"{where}: {type(self._model).__name__} shows {each.modality}s with {', '.join(foreign)}, which "
                    f"{type(self._processor).__name__} of vLLM does not know (it takes {', '.join(sorted(fields))}); "
                    "use the engine 'embedded'"
                )
            (item,) = inputs.MultiModalKwargsItems.from_hf_inputs(BatchFeature(each.inputs), fields)[each.modality]
            is_seen = None if bool(each.is_seen_U.all()) else each.is_seen_U
            place = inputs.PlaceholderRange(offset=each.start, length=len(each.is_seen_U), is_embed=is_seen)
            items.setdefault(each.modality, []).append(item)
            places.setdefault(each.modality, []).append(place)
            digests.setdefault(each.modality, []).append(_digest(each))
        return ShownPrompt(
            positions=conditioning.positions,
            next_position=conditioning.next_position,
            batch=conditioning.batch,
            items=inputs.MultiModalKwargsItems(items),
            places=places,
            digests=digests,
        )

    def _check(self, made: ShownPrompt, prompt: Payload, where: str) -> None:
        """Refuse a prompt whose units vLLM would put elsewhere than the trainer does."""
        if not hasattr(self._positions, "get_mrope_input_positions"):
            return
        inputs = importlib.import_module(_INPUTS)
        features = [
            inputs.MultiModalFeatureSpec(data=item, modality=kind, identifier="", mm_position=place)
            for kind, items in made.items.items()
            for item, place in zip(items, made.places[kind], strict=True)
        ]
        tokens = torch.frombuffer(bytearray(prompt.arrays["prompt"].data), dtype=torch.int32).tolist()
        found, delta = self._positions.get_mrope_input_positions(tokens, features)
        theirs, ours = (
            torch.cat([positions, torch.full((len(positions), 1), last)], dim=1)
            for positions, last in ((found, len(tokens) + delta), (made.positions, made.next_position))
        )
        if theirs.shape != ours.shape or not torch.equal(theirs, ours):
            unit = int((theirs != ours).any(0).nonzero()[0]) if theirs.shape == ours.shape else 0
            raise EngineError(
                f"{where}: vLLM's {type(self._positions).__name__} puts unit {unit} of its {len(tokens)} at "
                f"{theirs[:, unit].tolist()}, {type(self._model).__name__} at {ours[:, unit].tolist()} of the rotary "
                "axes: log-probs would be of another prompt; use the engine 'embedded', or show no "
                f"{' and no '.join(f'{kind}s' for kind in made.items)}"
            )


@contextlib.contextmanager
def taken_as_given(config: Any, *, most_units: int) -> Iterator[None]:
    """While a vLLM starts: its model's processor needs no tokenizer and no files, since it is never asked to process.

    Args:
        config: vLLM's own.
        most_units: Of what is seen, that may be computed in one step or be kept.

    Raises:
        EngineError: The model sees something, and vLLM has more processes than this one.
    """
    model, _ = importlib.import_module(_LOADER).get_model_architecture(config.model_config)
    factory = getattr(model, _FACTORY, None)
    if factory is None:
        yield
        return
    if config.parallel_config.world_size > 1:
        raise EngineError(needs_one_process(config.parallel_config.world_size, model.__name__))

    def most(_info: object, *, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:  # noqa: ARG001 - so it is asked
        return dict.fromkeys(mm_counts, most_units)

    info = type("Given", (factory.info,), {"get_mm_max_tokens_per_item": most})
    processor = type("Given", (factory.processor,), {"requires_tokenizer": False})
    setattr(model, _FACTORY, dataclasses.replace(factory, info=info, processor=processor))
    try:
        yield
    finally:
        setattr(model, _FACTORY, factory)


def _digest(shown: Shown) -> str:
    """The digest of what one image or video enters with: equal ones share what a tower makes of them."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(shown.inputs.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
