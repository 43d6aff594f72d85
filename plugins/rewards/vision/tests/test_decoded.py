"""Latents are scored as the frames that an autoencoder makes of them."""

import io
import json
import math

import numpy as np
import pytest
import torch

from cosmos_core.errors import ConfigError, DataError
from cosmos_core.protocols import Completion, RewardContext
from cosmos_core.types import Prompt
from cosmos_reward_vision.brightness import Brightness, BrightnessOptions
from cosmos_reward_vision.decoded import Decoded, DecodedOptions
from cosmos_service_reward_service.cosmos_rl import read_foreign

CONTEXT = RewardContext(name="mine", seed=0)
SIZE = {"height": 16, "width": 16, "num_frames": 9}
LATENTS = np.random.default_rng(0).normal(size=(2, 4, 3, 2, 1)).astype(np.float32)


def reward(wan, name="brightness", **options):
    given = {"model": "wan", "path": str(wan), "model_options": SIZE, **options}
    return Decoded(DecodedOptions(reward=name, **given), CONTEXT)


def sent(latents):
    """The completions of what a client of cosmos-rl sends."""
    arrays = io.BytesIO()
    np.save(arrays, latents)
    line = {"prompts": ["a", "b"], "reward_fn": {"decoded": 1.0}, "video_infos": [{"video_fps": 8.0}] * 2}
    return read_foreign(json.dumps(line).encode() + b"\n" + arrays.getvalue(), most=2).completions


def test_what_a_client_of_cosmos_rl_sends_is_decoded_and_scored(wan, wan_pipeline):
    made = reward(wan)
    made.load()
    config = wan_pipeline.vae.config
    std, mean = (torch.tensor(each).view(1, -1, 1, 1, 1) for each in (config.latents_std, config.latents_mean))
    with torch.no_grad():
        pixels = wan_pipeline.vae.decode(torch.from_numpy(LATENTS) * std + mean).sample.clamp(-1, 1)
    frames = ((pixels + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 4, 1)
    plain = Brightness(BrightnessOptions(), CONTEXT)
    for completion, expected in zip(sent(LATENTS), frames, strict=True):
        assert completion.media is None
        score = made.score(completion)
        shown = made._decoded(completion.payload)
        assert shown.arrays["frames"].shape == (9, 16, 8, 3)
        assert float(np.frombuffer(shown.arrays["fps"].data, np.float32)[0]) == 8.0
        found = np.frombuffer(shown.arrays["frames"].data, np.uint8).reshape(expected.shape)
        # Rounded alike, but for what is summed in another order.
        assert np.abs(found.astype(int) - expected.numpy()).max() <= 1
        with_frames = Completion(prompt=completion.prompt, text="", media=shown)
        assert math.isclose(score.value, plain.score(with_frames).value)
        assert made.score(with_frames) == score


def test_latents_of_another_autoencoder_have_no_score(wan):
    made = reward(wan)
    made.load()
    (first, _) = sent(LATENTS[:, :3])
    with pytest.raises(DataError, match=r"reward mine: the latents are float32 .*takes float32 \[4, frames"):
        made.score(first)
    with pytest.raises(DataError, match="neither frames nor latents"):
        made.score(Completion(prompt=Prompt(text="x"), text="x"))


def test_what_cannot_decode_or_score_is_refused(wan, tmp_path):
    for options, told in [
        ({"name": "math"}, "reward: 'math' scores tokens, and no frames"),
        ({"model": "qwen"}, "model: 'qwen' is of tokens, and has no autoencoder"),
        ({"name": "brightness", "reward_options": {"targt": 1}}, "reward_options.targt: unknown option"),
        ({"model_options": {"hight": 1}}, "model_options.hight: unknown option"),
    ]:
        with pytest.raises(ConfigError, match=told):
            reward(wan, **options)
    assert reward(wan).absent() == ""
    assert "is no folder on this machine" in reward(tmp_path / "none").absent()
    assert reward(wan, "colour").unset_variables(()) == ()
    with pytest.raises(DataError, match="names no colour"):
        reward(wan, "colour").vet(Prompt(text="a ball"))
    (tmp_path / "transformer").mkdir()
    with pytest.raises(ConfigError, match="no usable config"):
        reward(tmp_path).load()
