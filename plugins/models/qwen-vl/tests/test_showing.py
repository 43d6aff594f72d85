"""What a prompt shows, one by one, for implementations of the family beside transformers'."""

import itertools
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch

from cosmos_core.errors import DataError
from cosmos_core.models import values
from cosmos_core.protocols.vision import VisionModel
from cosmos_core.types import Array, Prompt
from cosmos_model_qwen_vl.row import GRIDS, PATCHES, PLACES
from cosmos_model_qwen_vl.tiny import data_url, film, picture
from cosmos_model_qwen_vl.tower import look


@pytest.fixture
def prompt(model, tmp_path):
    image = data_url(picture(40, 24))
    return model.encode(Prompt(text="<video> or <image>", media=(film(tmp_path / "film", 5, 24, 16), image)))


def test_each_stands_where_its_placeholders_are(model, prompt):
    assert isinstance(model, VisionModel)
    video, image = model.shown(prompt)
    assert (video.modality, image.modality) == ("video", "image")
    tokens = values(prompt, "prompt")
    kinds = torch.from_numpy(model.vision.tokens.kinds(tokens))
    for each, kind in ((video, 2), (image, 1)):
        units = kinds[each.start : each.start + len(each.is_seen_U)]
        assert torch.equal(units == kind, each.is_seen_U)
        assert each.is_seen_U[-1]
        assert int(each.is_seen_U.sum()) == int((kinds == kind).sum())
    assert image.is_seen_U.all()
    # Qwen3-VL writes each step's time, so that words stand between; its first step begins with its mark.
    if model.config.model_type == "qwen3_vl":
        assert tokens[video.start] == model.config.vision_start_token_id
        assert not video.is_seen_U.all()
    else:
        assert video.is_seen_U.all()


def test_each_has_the_arguments_of_transformers_for_itself_alone(model, module, prompt):
    """The tower makes of each alone what it makes of both together."""
    video, image = model.shown(prompt)
    assert image.inputs["image_grid_thw"].tolist() == [[1, 6, 10]]
    assert video.inputs["video_grid_thw"].tolist() == [[3, 4, 6]]
    assert video.inputs["pixel_values_videos"].shape == (72, 96)
    assert ("second_per_grid_ts" in video.inputs) == (model.config.model_type == "qwen2_5_vl")
    conditioning = model.condition(prompt)
    with torch.no_grad():
        entered = model.enter(module, conditioning)["inputs_embeds"]
        seen = module.base_model.get_image_features(
            image.inputs["pixel_values"], image.inputs["image_grid_thw"], return_dict=True
        )
    place = slice(image.start, image.start + len(image.is_seen_U))
    torch.testing.assert_close(entered[place], torch.cat(tuple(seen.pooler_output)), atol=1e-5, rtol=0)


def test_text_shows_nothing(model):
    assert list(model.shown(model.encode(Prompt(text="How many?")))) == []


def test_what_does_not_fit_its_prompt_is_refused(model, prompt):
    lost = {name: array for name, array in prompt.arrays.items() if name != "grids"}
    with pytest.raises(DataError, match="encode the prompt anew"):
        model.shown(attrs.evolve(prompt, arrays=lost))


def with_arrays(prompt, **changes):
    arrays = {
        name: Array(dtype=str(each.dtype), shape=each.shape, data=each.tobytes()) for name, each in changes.items()
    }
    return attrs.evolve(prompt, arrays={**prompt.arrays, **arrays})


def test_grids_and_times_that_nothing_has_are_refused(model, subtests):
    for ask, (grids, steps_s, said) in itertools.product(
        ["shown", "condition"],
        [
            (
                [[1, 4, 4], [0, 2, 2]],
                [0, 0],
                r"grid \[0, 2, 2\] and 0 s a step of its media 1 are no image's and no video's",
            ),
            ([[1, -4, -4]], [0], r"grid \[1, -4, -4\]"),
            ([[2, 2, 6], [2, 2, -2]], [0, 0], r"grid \[2, 2, -2\]"),
            ([[1, 16, 1]], [0], r"in multiples of 2"),
            ([[2**31 - 1] * 3], [0], "do not fit them"),
            ([[1, 4, 4]], [1], r"media 0 are a video's, and of its placeholders 0 to 3 4 are of the other kind"),
            ([[1, 4, 4]], [-1], r"-1 s a step of its media 0"),
            ([[1, 4, 4]], [float("nan")], r"nan s a step of its media 0"),
            ([[1, 4, 4]], [float("inf")], r"inf s a step of its media 0"),
            ([[1, 4, 4]], [0, 0], "do not fit them"),
            ([1, 4, 4], [0], "do not fit them"),
            ([[1, 4, 4]], 0, "do not fit them"),
        ],
    ):
        with subtests.test(ask=ask, grids=grids, steps_s=steps_s, said=said):
            prompt = model.encode(Prompt(text="<image>?", media=(data_url(picture(16, 16)),)))
            wrong = with_arrays(prompt, grids=np.asarray(grids, np.int32), steps_s=np.asarray(steps_s, np.float32))
            with pytest.raises(DataError, match=said):
                getattr(model, ask)(wrong)


def test_the_config_tells_others_how_axes_take_turns(model, module):
    """transformers' model of Qwen3-VL does so whatever its config says."""
    says = module.config.text_config.rope_parameters.get("mrope_interleaved", False)
    assert says == (model.config.model_type == "qwen3_vl")


@pytest.mark.parametrize("joined", [torch.cat, list])
def test_features_of_deeper_layers_come_together_or_of_each_picture(joined):
    pictures = [torch.ones(4, 8), torch.zeros(2, 8)]
    output = SimpleNamespace(pooler_output=pictures, deepstack_features=[joined(pictures), joined(pictures)])
    module = SimpleNamespace(base_model=SimpleNamespace(get_image_features=lambda *_, **__: output))
    inputs = {PATCHES: torch.ones(24, 3), GRIDS: torch.ones(2, 3), PLACES: torch.arange(6)}
    found = look(module, inputs, SimpleNamespace(normalise=lambda patches: patches))
    assert found.first_KD.shape == (6, 8)
    assert [each.tolist() for each in found.deeper_KD] == [torch.cat(pictures).tolist()] * 2
