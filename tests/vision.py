"""Tiny checkpoints of vision-language models of transformers, each with the processor of its family, and prompts."""

from __future__ import annotations

import base64
import importlib
import io
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
import torch
import transformers
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

from cosmos_core.models.tokenizer import build_tokenizer
from cosmos_core.models.vision.images import load_image
from cosmos_core.models.vision.rows import without_videos
from cosmos_core.types import Message, Prompt

CORPUS: Final = ["Which colour? red, blue and 12 or 34", "user: assistant: picture"]
TEXT: Final[Mapping[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "vocab_size": 352,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER: Final[Mapping[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.2,
    "image_size": 16,
    "patch_size": 4,
}
WINDOWS: Final = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
PATCHES: Final = {
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 1024},
}
PATCH_TOWER: Final = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "hidden_size": 32,
    "initializer_range": 0.2,
}
SQUARE: Final = {"size": {"height": 16, "width": 16}}
GRID: Final = [[16, 32], [32, 16], [32, 32]]
TEMPLATE: Final = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{% if part.type == 'image' %}MARK{% else %}{{ part.text }}{% endif %}{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def rotary(*sections: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}


@attrs.frozen(kw_only=True)
class Family:
    """A family of models.

    Attributes:
        config: Of the model, besides its `model_type`; the tables of text and tower on top of `TEXT` and `TOWER`.
        text: On top of `TEXT`.
        tower: On top of `TOWER`, or of nothing if it names a `depth`.
        processor: Its class and its settings.
        images: The class and the settings of its processor of images.
        tokens: Special tokens, by the names under which the tokenizer knows them; or without.
        ids: Under which names the config keeps ids of tokens.
        others: Special tokens without a name.
    """

    text: Mapping[str, Any]
    tower: Mapping[str, Any]
    processor: tuple[str, Mapping[str, Any]]
    images: tuple[str, str, Mapping[str, Any]]
    ids: Mapping[str, str]
    tokens: Mapping[str, str] = attrs.field(factory=dict)
    others: tuple[str, ...] = ()
    config: Mapping[str, Any] = attrs.field(factory=dict)


QWEN_TOKENS: Final = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
QWEN_IDS: Final = {f"{name}_id": token for name, token in QWEN_TOKENS.items()}
IMAGE: Final = {"image_token": "<image>"}
LLAVA: Final = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}

FAMILIES: Final[Mapping[str, Family]] = {
    "llava": Family(
        text={"model_type": "llama"},
        tower={"model_type": "clip_vision_model"},
        processor=("LlavaProcessor", LLAVA),
        images=(
            "clip",
            "CLIPImageProcessorPil",
            {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}},
        ),
        tokens=IMAGE,
        ids={"image_token_index": "<image>"},
    ),
    "llava_next": Family(
        text={"model_type": "mistral"},
        tower={"model_type": "clip_vision_model"},
        config={"image_grid_pinpoints": GRID},
        processor=("LlavaNextProcessor", LLAVA),
        images=(
            "llava_next",
            "LlavaNextImageProcessorPil",
            {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}, "image_grid_pinpoints": GRID},
        ),
        tokens=IMAGE,
        ids={"image_token_index": "<image>"},
    ),
    "internvl": Family(
        text={"model_type": "qwen2"},
        tower={"image_size": [16, 16], "patch_size": [4, 4]},
        config={"downsample_ratio": 0.5},
        processor=("InternVLProcessor", {"image_seq_length": 4}),
        images=("got_ocr2", "GotOcr2ImageProcessorPil", {**SQUARE, "crop_to_patches": True, "max_patches": 3}),
        tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        ids={"image_token_id": "<IMG_CONTEXT>"},
    ),
    "idefics3": Family(
        text={"model_type": "llama"},
        tower={},
        config={"scale_factor": 2},
        processor=("Idefics3Processor", {"image_seq_len": 4}),
        images=(
            "idefics3",
            "Idefics3ImageProcessorPil",
            {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}},
        ),
        others=("<end_of_utterance>", *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4))),
        tokens={**IMAGE, "fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>"},
        ids={"image_token_id": "<image>"},
    ),
    "qwen2_vl": Family(
        text={"rope_parameters": rotary(1, 1, 2)},
        tower={**PATCH_TOWER, "embed_dim": 32, "mlp_ratio": 2},
        processor=("Qwen2VLProcessor", {}),
        images=("qwen2_vl", "Qwen2VLImageProcessorPil", PATCHES),
        tokens=QWEN_TOKENS,
        ids=QWEN_IDS,
    ),
    "qwen3_vl": Family(
        text={"head_dim": 8, "rope_parameters": rotary(2, 1, 1), "num_hidden_layers": 3},
        tower={
            **PATCH_TOWER,
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        processor=("Qwen3VLProcessor", {}),
        images=("qwen2_vl", "Qwen2VLImageProcessorPil", PATCHES),
        tokens=QWEN_TOKENS,
        ids=QWEN_IDS,
    ),
    "glm4v": Family(
        text={"rope_parameters": {**rotary(1, 1, 2), "partial_rotary_factor": 1.0}},
        tower={**PATCH_TOWER, "intermediate_size": 48, "out_hidden_size": 32, "image_size": 32},
        processor=("Glm4vProcessor", {}),
        images=("glm4v", "Glm4vImageProcessorPil", PATCHES),
        tokens={"image_token": "<|image|>", "video_token": "<|video|>"},
        others=("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
        ids={
            "image_token_id": "<|image|>",
            "video_token_id": "<|video|>",
            "image_start_token_id": "<|begin_of_image|>",
            "image_end_token_id": "<|end_of_image|>",
            "video_start_token_id": "<|begin_of_video|>",
            "video_end_token_id": "<|end_of_video|>",
        },
    ),
}
REFUSED: Final[Mapping[str, Family]] = {
    "aya_vision": Family(
        text={"model_type": "cohere2", **WINDOWS},
        tower={"model_type": "siglip_vision_model"},
        config={"downsample_factor": 2},
        processor=("AyaVisionProcessor", {"patch_size": 4, "img_size": 16, "downsample_factor": 2}),
        images=("got_ocr2", "GotOcr2ImageProcessorPil", {**SQUARE, "crop_to_patches": True, "max_patches": 3}),
        others=(
            "<|START_OF_IMG|>",
            "<|END_OF_IMG|>",
            "<|IMG_LINE_BREAK|>",
            "<|IMG_PATCH|>",
            "TILE",
            "TILE_GLOBAL",
            "<image>",
        ),
        ids={"image_token_index": "<|IMG_PATCH|>"},
    ),
    "gemma3": Family(
        text={"head_dim": 8, "query_pre_attn_scalar": 8, **WINDOWS},
        tower={},
        config={"mm_tokens_per_image": 4},
        processor=("Gemma3Processor", {"image_seq_length": 4}),
        images=("gemma3", "Gemma3ImageProcessorPil", {**SQUARE, "do_pan_and_scan": False}),
        tokens={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        ids={
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
    ),
    "paligemma": Family(
        text={"model_type": "gemma", "head_dim": 8},
        tower={"model_type": "siglip_vision_model", "projection_dim": 32},
        config={"projection_dim": 32},
        processor=("PaliGemmaProcessor", {}),
        images=("siglip", "SiglipImageProcessorPil", {**SQUARE, "image_seq_length": 16}),
        tokens=IMAGE,
        ids={"image_token_index": "<image>"},
    ),
}


def checkpoint(folder: Path, name: str, **text: Any) -> Path:
    """A checkpoint of a family, of weights that are drawn.

    Args:
        folder: Where it is written.
        name: Of the family.
        text: Of the text's config, such as `num_hidden_layers`.
    """
    family = (FAMILIES | REFUSED)[name]
    tokenizer = _tokenizer(family)
    module, images, settings = family.images
    image_class = getattr(
        importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}"), images
    )
    image_processor = image_class(**{key: value for key, value in settings.items() if key != "image_seq_length"})
    image_processor.image_seq_length = settings.get("image_seq_length")
    processor_class = without_videos(getattr(transformers, family.processor[0]))
    processor = processor_class(image_processor, tokenizer, **family.processor[1])
    mark = getattr(processor, "boi_token", None) or processor.image_token
    processor.chat_template = TEMPLATE.replace("MARK", mark)
    processor.save_pretrained(folder)
    config = AutoConfig.for_model(
        name,
        text_config={**TEXT, **family.text, **text},
        vision_config=dict(family.tower) if "depth" in family.tower else {**TOWER, **family.tower},
        **{key: tokenizer.convert_tokens_to_ids(token) for key, token in family.ids.items()},
        **family.config,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def _tokenizer(family: Family) -> Any:
    made = build_tokenizer(CORPUS, {"build": "byte-bpe", "vocab_size": 290, "split_digits": True})
    made.add_special_tokens({"additional_special_tokens": [*family.tokens.values(), *family.others]})
    with tempfile.TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        return PreTrainedTokenizerFast.from_pretrained(folder, extra_special_tokens=dict(family.tokens))


def picture(width: int, height: int, seed: int = 0) -> str:
    """An image of smooth noise, as a location."""
    pixels = np.random.default_rng(seed).integers(0, 255, (4, 5, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC).save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def prompts() -> list[Prompt]:
    """Rows with no image, one and two, of different sizes; plain text and chats."""
    wide, small, tall = picture(72, 40, 1), picture(20, 20, 2), picture(16, 50, 3)
    chat = (Message(role="system", content="See."), Message(role="user", content="Is <image> red, or <image>?"))
    return [
        Prompt(text="How many, of which colours?", demonstration="twelve, or 13"),
        Prompt(text="Which colour?", demonstration="red", media=(wide,)),
        Prompt(text="<image> is not <image>, is it", demonstration="blue", media=(small, tall)),
        Prompt(text=chat, demonstration="this", media=(tall, wide)),
        Prompt(text=chat[:1], demonstration="no <image> in it"),
    ]


def own_processor(folder: Path) -> Any:
    """transformers' processor of a checkpoint, whose folder has the family's name."""
    return without_videos(getattr(transformers, (FAMILIES | REFUSED)[folder.name].processor[0])).from_pretrained(folder)


def own_inputs(
    processor: Any, prompt: Prompt, *, with_end: bool = True
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What transformers' own forward takes of a prompt and its demonstration, and the tokens of the latter.

    Args:
        processor: From `own_processor`.
        prompt: What is written.
        with_end: Whether the demonstration is part of it.
    """
    images = [load_image(location) for location in prompt.media]
    text = _written(prompt, processor.image_token)
    made = (
        processor(text=[text], images=[images], return_tensors="np", return_mm_token_type_ids=True)
        if images
        else processor.tokenizer([text], return_tensors="np")
    )
    given = {name: torch.as_tensor(value) for name, value in made.items() if name != "token_type_ids"}
    ids = processor.tokenizer(prompt.demonstration, add_special_tokens=False)["input_ids"]
    end = torch.tensor([[*ids, processor.tokenizer.eos_token_id]])
    more = {"input_ids": end, "attention_mask": torch.ones_like(end), "mm_token_type_ids": torch.zeros_like(end)}
    for name in more.keys() & given.keys() if with_end else ():
        given[name] = torch.cat([given[name], more[name]], dim=1)
    return given, end[0]


def _written(prompt: Prompt, mark: str) -> str:
    """A prompt's text as a user of transformers would write it."""
    if isinstance(prompt.text, str):
        text = prompt.text if "<image>" in prompt.text or not prompt.media else "<image>" + prompt.text
        return text.replace("<image>", mark) if prompt.media else text
    turns = "".join(f"{turn.role}: {turn.content}\n" for turn in prompt.text) + "assistant: "
    return turns.replace("<image>", mark)
