"""What each reward makes of frames whose right score is known, and of what cannot be scored."""

import io
import json
import math
import sys

import attrs
import numpy as np
import pytest
from PIL import Image

from cosmos_core.errors import ConfigError, DataError
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Completion, RewardContext
from cosmos_core.types import Array, Message, Payload, Prompt
from cosmos_service_reward_service.bodies import read_body

CONTEXT = RewardContext(name="mine", seed=0)


@pytest.fixture(scope="module")
def plugins():
    names = ("brightness", "clip-similarity", "colour", "jpeg-compressibility", "ocr", "sharpness")
    return PluginSet.load(("reward", name) for name in (*names, "latent-temporal-consistency", "temporal-consistency"))


@pytest.fixture
def make(plugins):
    return lambda name, **options: plugins.create("reward", name, options, CONTEXT)


def value(reward, completion):
    return reward.score(completion).value


def test_the_colour_that_is_asked_for_scores_nothing_and_others_their_distance(make, kit, subtests):
    for prompt, reference, colour in [
        ("A RED ball", None, (255, 0, 0)),
        ("a gray cat and a grey dog", None, (128, 128, 128)),
        ("a blueberry on green grass", None, (0, 128, 0)),
        ("a red ball", "teal", (0, 128, 128)),
        ("a ball", "#102030", (16, 32, 48)),
        ("a ball", [230, 51, 51.0], (230, 51, 51)),
    ]:
        with subtests.test(prompt=prompt, reference=reference, colour=colour):
            reward = make("colour")
            fitting = kit.completion(kit.video(colour, colour), text=prompt, reference=reference)
            reward.vet(fitting.prompt)
            assert value(reward, fitting) == pytest.approx(0.0, abs=1e-12)
            off = np.array(colour) + np.array([0, 10, 0])
            assert value(
                reward, kit.completion(kit.video(off, off), text=prompt, reference=reference)
            ) == pytest.approx(-10 / 127.5)


def test_the_mean_is_of_all_frames_and_told(make, kit):
    scored = make("colour").score(kit.completion(kit.video((255, 0, 0), (0, 0, 0)), text="red"))
    assert scored.value == pytest.approx(-1.0)
    assert scored.details == {"mean": [0.0, -1.0, -1.0]}


def test_a_row_without_a_colour_is_refused_before_the_run_and_in_it(make, kit, subtests):
    for prompt, message in [
        (Prompt(text="a ball"), "the prompt 'a ball' names no colour"),
        (Prompt(text="a red and a blue ball"), "names blue and red; name one of"),
        (Prompt(text=(Message(role="user", content="tomato"),)), "names no colour"),
        (Prompt(text="red", reference="reddish"), "the reference 'reddish' is no colour"),
        (Prompt(text="red", reference=[0, 0, 256]), r"the reference \[0, 0, 256\] is no colour"),
        (Prompt(text="red", reference=[True, 0, 0]), "is no colour"),
    ]:
        with subtests.test(prompt=prompt, message=message):
            reward = make("colour")
            with pytest.raises(DataError, match=message):
                reward.vet(prompt)
            with pytest.raises(DataError, match=f"reward mine: .*{message}"):
                reward.score(attrs.evolve(kit.completion(kit.video((0, 0, 0))), prompt=prompt))


def test_brightness_is_luma_and_with_a_target_the_distance_from_it(make, kit):
    green = kit.completion(kit.video((0, 255, 0)))
    assert value(make("brightness"), green) == pytest.approx(0.7152, abs=1e-4)
    assert value(make("brightness", target=0.5), green) == pytest.approx(-0.2152, abs=1e-4)


def test_sharpness_of_a_chessboard_by_hand(make, kit):
    board = np.indices((6, 6)).sum(0) % 2 * 255
    frames = np.repeat(board[None, :, :, None], 3, axis=3)
    # Of 4 x 4 inner pixels each is 4 * 255 above or below its neighbours.
    variance = (4 * 255) ** 2
    assert value(make("sharpness", logarithm=False), kit.completion(frames)) == pytest.approx(variance, rel=1e-4)
    assert value(make("sharpness"), kit.completion(frames)) == pytest.approx(math.log1p(variance), rel=1e-4)


def test_jpeg_counts_the_kilobytes_of_some_frames(make, kit):
    noise = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), np.uint8)
    sizes = []
    for frame in noise:
        file = io.BytesIO()
        Image.fromarray(frame).save(file, "JPEG", quality=80)
        sizes.append(len(file.getvalue()) / 1000)
    reward = make("jpeg-compressibility", quality=80, frames=3)
    scored = reward.score(kit.completion(noise))
    assert scored.value == pytest.approx(-(sizes[0] + sizes[2] + sizes[4]) / 3)
    assert scored.details == {"frames": 3}
    assert value(reward, kit.completion(kit.video((9, 9, 9), height=32, width=32))) > scored.value


def test_steadiness_counts_change_above_what_is_free_pair_by_pair(make, kit):
    frames = kit.completion(kit.video((0, 0, 0), (51, 51, 51), (51, 51, 51)))
    assert value(make("temporal-consistency"), frames) == pytest.approx(-0.1)
    assert value(make("temporal-consistency", free=0.1), frames) == pytest.approx(-0.05)
    back = kit.completion(kit.video((255, 255, 255), (0, 0, 0)))
    assert value(make("temporal-consistency"), back) == -1.0


def test_clip_is_the_models_own_cosine(make, kit, clip):
    import torch
    import transformers

    reward = make("clip-similarity", path=str(clip), frames=2)
    reward.load()
    noise = np.random.default_rng(0).integers(0, 256, (3, 12, 12, 3), np.uint8)
    scored = reward.score(kit.completion(noise, text="a ball"))
    model = transformers.CLIPModel.from_pretrained(clip).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(clip)("a ball", return_tensors="pt")
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    pixels = torch.from_numpy(((noise[[0, 2]] / 255 - mean) / std).transpose(0, 3, 1, 2)).float()
    with torch.no_grad():
        cosines = model(**tokens, pixel_values=pixels).logits_per_image / model.logit_scale.exp()
    assert scored.value == pytest.approx(cosines.mean().item(), abs=1e-6)
    assert scored.details == {"frames": 2}


def test_clip_prepares_pictures_as_its_own_processor(make, kit, clip):
    import transformers

    reward = make("clip-similarity", path=str(clip))
    reward.load()
    for side, height, width in ((12, 40, 23), (336, 480, 720), (336, 720, 480)):
        frame = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
        size = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
        processor = transformers.CLIPImageProcessorPil(**size)
        expected = processor(Image.fromarray(frame), return_tensors="np")["pixel_values"][0]
        reward._clip._side = side
        assert np.abs(reward._clip._prepared(frame).numpy() - expected).max() < 1e-5


def test_clip_takes_the_checkpoints_own_normalisation_and_says_what_it_cut(make, kit, clip, tmp_path):
    import json
    import shutil

    folder = tmp_path / "other"
    shutil.copytree(clip, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    reward = make("clip-similarity", path=str(folder))
    reward.load()
    assert reward._clip._prepared(np.full((12, 12, 3), 255, np.uint8)).unique().tolist() == [1.0]
    scored = reward.score(kit.completion(kit.video((1, 2, 3)), text="x" * 100))
    assert scored.details == {"frames": 1, "tokens_cut": 37}


def test_what_is_no_clip_is_refused_with_its_path(make, tmp_path):
    import transformers

    with pytest.raises(ConfigError, match=f"path: '{tmp_path}' cannot be loaded as a CLIP model: "):
        make("clip-similarity", path=str(tmp_path)).load()
    transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cannot be loaded as a CLIP model"):
        make("clip-similarity", path=str(tmp_path)).load()


def test_ocr_without_what_reads_says_what_to_install(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidocr_onnxruntime", None)
    reward = make("ocr")
    with pytest.raises(ConfigError, match=r'pip install "cosmos-reward-vision\[ocr\]"'):
        reward.load()
    assert 'pip install "cosmos-reward-vision[ocr]"' in reward.absent()


def test_a_folder_that_is_not_there_is_absent_and_a_name_may_be_of_a_hub(make, tmp_path):
    assert make("clip-similarity", path=str(tmp_path / "none")).absent().startswith(f"path: '{tmp_path}/none' is no")
    assert make("clip-similarity", path=str(tmp_path)).absent() == ""
    assert make("clip-similarity", path="openai/none").absent() == ""


def test_edits(subtests):
    for first, second, number in [("", "", 0), ("", "abc", 3), ("kitten", "sitting", 3), ("ab", "ba", 2)]:
        with subtests.test(first=first, second=second, number=number):
            from cosmos_reward_vision.ocr import edits

            assert edits(first, second) == edits(second, first) == number


def test_what_was_not_rendered_has_no_score(make, kit, subtests):
    for name in ["brightness", "jpeg-compressibility", "sharpness", "temporal-consistency", "colour"]:
        with subtests.test(name=name):
            bare = attrs.evolve(kit.completion(kit.video((0, 0, 0)), text="red"), media=None)
            with pytest.raises(
                DataError, match="reward mine: the completion has no frames; use an engine that renders"
            ):
                make(name).score(bare)


def test_latents_are_scored_as_a_service_brings_them(make):
    """In 16 bits, of which scorers see float32; what is free costs nothing."""
    line = {"version": 1, "kind": "latents", "scorers": ["any"], "completions": [{"prompt": "a ball"}] * 2}
    latents = np.zeros((2, 1, 3, 1, 2), np.float16)
    latents[0, 0, :, 0] = [[1, 0], [0, 2], [0, 4]]
    latents[1, 0, :, 0] = [[1, 1], [2, 2], [-3, -3]]
    file = io.BytesIO()
    np.save(file, latents)
    shown = read_body(json.dumps(line).encode() + b"\n" + file.getvalue(), most=2).completions
    assert [value(make("latent-temporal-consistency"), each) for each in shown] == pytest.approx([-0.5, -1.0])
    assert [value(make("latent-temporal-consistency", free=0.5), each) for each in shown] == [-0.25, -0.75]


def test_other_latents_are_refused(make, subtests):
    for dtype, shape, message in [
        ("float32", (1, 2, 2), r"the latents are float32 \(1, 2, 2\); expected float32 \[channels, frames"),
        ("float16", (1, 2, 1, 4), "the latents are float16"),
    ]:
        with subtests.test(dtype=dtype, shape=shape, message=message):
            array = Array(dtype=dtype, shape=shape, data=b"\x01" * 16)
            completion = Completion(
                prompt=Prompt(text="?"), text="", payload=Payload(kind="latents", arrays={"sample": array})
            )
            with pytest.raises(DataError, match=message):
                make("latent-temporal-consistency").score(completion)
