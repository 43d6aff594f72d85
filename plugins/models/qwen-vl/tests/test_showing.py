"""What a prompt shows, one by one, for implementations of the family beside transformers'."""

import attrs
import pytest
import torch

from cosmos_core.errors import DataError
from cosmos_core.policy.modeling import values
from cosmos_core.protocols import Showing
from cosmos_core.types import Prompt
from cosmos_model_qwen_vl.tiny import data_url, film, picture


@pytest.fixture
def prompt(model, tmp_path):
    image = data_url(picture(40, 24))
    return model.encode(Prompt(text="<video> or <image>", media=(film(tmp_path / "film", 5, 24, 16), image)))


def test_each_stands_where_its_placeholders_are(model, prompt):
    assert isinstance(model, Showing)
    video, image = model.shown(prompt)
    assert (video.modality, image.modality) == ("video", "image")
    tokens = values(prompt, "prompt")
    kinds = torch.from_numpy(model.sight.tokens.kinds(tokens))
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


def test_the_config_tells_others_how_axes_take_turns(model, module):
    """transformers' model of Qwen3-VL does so whatever its config says."""
    says = module.config.text_config.rope_parameters.get("mrope_interleaved", False)
    assert says == (model.config.model_type == "qwen3_vl")
