"""Patches as transformers' own processor makes them, and placeholders where the text says."""

import attrs
import numpy as np
import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from cosmos_core.errors import ConfigError, DataError
from cosmos_core.models import values
from cosmos_core.models.tokens import array_of, tokens_payload, view
from cosmos_core.protocols import ModelContext
from cosmos_core.types import Message, Prompt
from cosmos_model_qwen_vl import QwenVLModel, QwenVLOptions
from cosmos_model_qwen_vl.family import IMAGE, VIDEO, VISION_END, VISION_START
from cosmos_model_qwen_vl.media import Still, Video
from cosmos_model_qwen_vl.row import GRIDS, PATCHES
from cosmos_model_qwen_vl.tiny import CONFIGS, OPTIONS, TOKENIZER, data_url, film, picture


def make(folder, name="qwen3_vl", **changes):
    context = ModelContext(path=None, config={**CONFIGS[name], **changes}, assets=folder / "assets")
    return QwenVLModel(QwenVLOptions(**OPTIONS), context)


@pytest.fixture(params=sorted(CONFIGS))
def model(request, tmp_path):
    model = make(tmp_path, request.param)
    model.prepare(["Which colour at 0.5 seconds?"], TOKENIZER)
    return model


def text(model, prompt):
    """The encoded prompt, runs of a placeholder as `pad*number`."""
    ids = values(model.encode(prompt), "prompt").tolist()
    decoded = model.tokenizer.decode(ids)
    for name, token in (("image", IMAGE), ("video", VIDEO)):
        while token in decoded:
            before, _, rest = decoded.partition(token)
            number = 1
            while rest.startswith(token):
                number, rest = number + 1, rest[len(token) :]
            decoded = f"{before}{name}*{number}{rest}"
    return decoded.replace(VISION_START, "[").replace(VISION_END, "]")


def contents(payload):
    return {name: (array.shape, bytes(array.data)) for name, array in payload.arrays.items()}


def test_patches_of_images_are_those_of_transformers(model, subtests):
    for size in [(40, 24), (7, 90), (300, 200), (16, 16)]:
        with subtests.test(size=size):
            image = picture(*size)
            patcher = model.vision.patcher
            own = patcher.see(Still(image=image))
            processor = Qwen2VLImageProcessorPil(
                patch_size=4,
                merge_size=2,
                size={"shortest_edge": 64, "longest_edge": 1024},
                image_mean=list(patcher.family.mean),
                image_std=list(patcher.family.std),
            )
            expected = processor.preprocess([image], return_tensors="pt")
            assert own.grid == tuple(expected["image_grid_thw"][0].tolist())
            found = patcher.normalise(torch.from_numpy(own.patches_MW))
            torch.testing.assert_close(found, expected["pixel_values"].float(), atol=1e-5, rtol=0)


def test_a_video_of_one_picture_has_the_patches_of_the_picture(model):
    """Its temporal patches are two frames alike, as an image's are."""
    image = picture(24, 16)
    still = model.vision.patcher.see(Still(image=image))
    video = model.vision.patcher.see(Video(frames=[image] * 4, times_s=[0.0, 0.5, 1.0, 1.5], fps=2.0))
    assert video.grid == (2, *still.grid[1:])
    assert np.array_equal(video.patches_MW, np.concatenate([still.patches_MW] * 2))
    assert video.step_s == 1.0


def test_an_odd_number_of_frames_repeats_the_last(model):
    frames = [picture(24, 16, seed) for seed in range(3)]
    odd = model.vision.patcher.see(Video(frames=frames, times_s=[0.0, 0.5, 1.0], fps=2.0))
    even = model.vision.patcher.see(Video(frames=[*frames, frames[2]], times_s=[0.0, 0.5, 1.0, 1.0], fps=2.0))
    assert np.array_equal(odd.patches_MW, even.patches_MW)


def test_media_stand_at_their_marks_or_before_the_text(model):
    media = (data_url(picture(16, 16)), data_url(picture(32, 16)))
    assert text(model, Prompt(text="Which?", media=media)) == "[image*4][image*8]Which?"
    assert text(model, Prompt(text="A <image>, B <image>.", media=media)) == "A [image*4], B [image*8]."
    assert text(model, Prompt(text="No <image> here")) == "No <image> here"


def test_media_of_a_chat_stand_in_the_first_turn_of_the_user(model):
    turns = (Message(role="system", content="S"), Message(role="user", content="U"), Message(role="user", content="V"))
    found = text(model, Prompt(text=turns, media=(data_url(picture(16, 16)),)))
    assert "user\n[image*4]U<|im_end|>" in found


def test_placeholders_of_a_video(model, tmp_path):
    found = text(model, Prompt(text="<video>?", media=(film(tmp_path / "film", 4, 16, 16),)))
    expected = {
        "qwen2_5_vl": "[video*8]?",
        "qwen3_vl": "<0.2 seconds>[video*4]<1.2 seconds>[video*4]?",
    }
    assert found == expected[model.config.model_type]


def test_marks_that_do_not_match_the_media_are_refused(model, tmp_path, subtests):
    media = (film(tmp_path / "film", 2, 16, 16), data_url(picture(16, 16)))
    for words in ["<image>", "<image> <video>", "<video> <image> <image>"]:
        with (
            subtests.test(words=words),
            pytest.raises(DataError, match=r"the row's media are <video> <image>"),
        ):
            model.encode(Prompt(text=words, media=media))


def test_placeholders_in_the_text_are_refused(model):
    with pytest.raises(DataError, match="has 1 placeholders of patches, and its 0 media need 0"):
        model.encode(Prompt(text=f"So {IMAGE}?"))


def test_an_image_too_long_and_thin_is_refused(model):
    with pytest.raises(DataError, match="aspect ratio"):
        model.encode(Prompt(text="?", media=(data_url(picture(2000, 2)),)))


def test_payloads_hold_bytes(model):
    arrays = model.encode(Prompt(text="?", media=(data_url(picture(16, 16)),))).arrays
    assert arrays[PATCHES].dtype == "uint8"
    assert arrays[GRIDS].dtype == "int32"
    assert set(model.encode(Prompt(text="?")).arrays) == {"prompt"}


def test_a_row_filled_up_sees_nothing_there(model):
    shown = model.encode_demonstration(Prompt(text="?", demonstration="a", media=(data_url(picture(16, 16)),)))
    (batch,) = model.pack([shown], budget=100, multiple=64)
    assert batch.num_units == 64
    length = batch.inputs["lengths"][0].item()
    assert batch.inputs["positions"].shape == (3, 64)
    assert batch.inputs["positions"][:, length:].tolist() == [list(range(64 - length))] * 3
    assert batch.inputs["visual"].max() < length


def test_positions_are_a_grid_within_an_image(model):
    shown = model.encode_demonstration(Prompt(text="<image>?", demonstration="a", media=(data_url(picture(32, 16)),)))
    (batch,) = model.pack([shown], budget=100)
    # One token opens the image, 2 x 4 are in it, one closes it.
    assert batch.inputs["positions"][:, :10].tolist() == [
        [0, *[1] * 8, 5],
        [0, *[1] * 4, *[2] * 4, 5],
        [0, *[1, 2, 3, 4] * 2, 5],
    ]
    assert view(shown, GRIDS).tolist() == [[1, 4, 8]]


def test_an_unknown_key_of_a_part_of_the_config_is_refused(tmp_path):
    model = make(tmp_path, vision_config={"depht": 2})
    with pytest.raises(ConfigError, match=r"model\.config\.vision_config\.depht: .* did you mean depth\?"):
        model.prepare(["a"], TOKENIZER)


def test_another_family_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="'gpt2' is not one of this plugin's: qwen2_5_vl, qwen3_vl"):
        QwenVLModel(QwenVLOptions(), ModelContext(path=None, config={"model_type": "gpt2"}, assets=tmp_path)).facts()


def test_turns_show_images_as_rows_do(model):
    wide, small = data_url(picture(40, 24, 1)), data_url(picture(16, 16, 2))
    said = (
        Message(role="user", content="Is  red?", media=(wide,), places=(3,)),
        Message(role="assistant", content="yes"),
        Message(role="user", content="or ", media=(small,), places=(3,)),
    )
    marked = tuple(
        attrs.evolve(turn, content=content, media=(), places=())
        for turn, content in zip(said, ["Is <image> red?", "yes", "or <image>"], strict=True)
    )
    rows = (
        Prompt(text=said),
        Prompt(text=(marked[0], *said[1:]), media=(wide,)),
        Prompt(text=marked, media=(wide, small)),
    )
    in_turns, mixed, whole = map(model.encode, rows)
    assert contents(in_turns) == contents(mixed) == contents(whole)
    # What the model said is text, whatever it spells: here a placeholder.
    stop = model.tokenizer.convert_tokens_to_ids("<|im_end|>")
    written = [model.tokenizer.convert_tokens_to_ids(IMAGE), stop]
    first = Prompt(text=said[:1])
    after = model.encode_seen_turns(first, written, said[2:])
    going = model.join([model.encode(first), tokens_payload(written), after])
    kinds = [model.vision.tokens.kinds(values(each, "prompt")).tolist() for each in (model.encode(first), after)]
    assert values(going, "kinds").tolist() == [*kinds[0], 0, 0, *kinds[1]]
    assert sum(kinds[1]) == len(view(after, PATCHES)) // 4
    for name in (PATCHES, GRIDS):
        assert np.array_equal(view(going, name), view(whole, name))
    shown = model.shown(going)
    assert [each.start for each in shown] == [
        kinds[0].index(1),
        len(kinds[0]) + 2 + kinds[1].index(1),
    ]
    assert model.condition(going).positions.shape[-1] == len(values(going, "prompt"))
    for wrong in ([1], [1] * len(values(going, "prompt")), [0] * 900):
        arrays = {**going.arrays, "kinds": array_of(np.asarray(wrong, np.int64))}
        with pytest.raises(DataError, match="encode the dialogue anew"):
            model.condition(attrs.evolve(going, arrays=arrays))
