"""What rows give: frames that stay, videos to imitate, embeddings; and what is refused."""

import numpy as np
import pytest
import torch
from diffusers import Cosmos2_5_PredictBasePipeline
from safetensors.torch import save_file

from cosmos_core.errors import ConfigError, DataError
from cosmos_core.models.diffusion import tensor_of
from cosmos_core.types import Message, Prompt
from cosmos_core.weights.shards import canonical_tensors
from cosmos_model_cosmos_predict import tiny


@pytest.fixture
def film(tmp_path):
    def saved(number=4, size=8, name="film"):
        frames = np.random.default_rng(number).integers(0, 255, (number, size, size, 3), np.uint8)
        np.save(tmp_path / f"{name}.npy", frames)
        return str(tmp_path / f"{name}.npy"), torch.from_numpy(frames).float() / 127.5 - 1

    return saved


def array(payload, name, dtype=torch.float32):
    return tensor_of(payload, name, dtype, (None,) * len(payload.arrays[name].shape))


def test_a_video_to_imitate_is_its_pixels(model, film):
    location, pixels = film(5)
    payload = model.encode_demonstration(Prompt(text="red", demonstration=location))
    torch.testing.assert_close(array(payload, "sample"), pixels[:4].permute(3, 0, 1, 2))


def test_given_frames_are_part_of_the_sample(model, film, subtests):
    for number in [None, 2]:
        with subtests.test(number=number):
            (location, pixels), (shown, given) = film(4), film(3, name="given")
            metadata = {} if number is None else {"num_given_frames": number}
            kept = number or 1
            row = Prompt(text="red", demonstration=location, media=(shown,), metadata=metadata)
            payload = model.encode_demonstration(row)
            assert array(payload, "is_given", torch.bool).tolist() == [frame < kept for frame in range(4)]
            expected = torch.cat((given[-kept:], pixels[kept:])).permute(3, 0, 1, 2)
            torch.testing.assert_close(array(payload, "sample"), expected)
            latent_spec = model.latent_spec(model.encode(row))
            assert (latent_spec.given[:, :kept] == expected[:, :kept]).all()


def test_without_media_the_first_frames_of_the_demonstration_are_given(model, film):
    location, pixels = film(4)
    payload = model.encode(Prompt(text="red", demonstration=location, metadata={"num_given_frames": 1}))
    torch.testing.assert_close(array(payload, "given")[:, 0], pixels[0].permute(2, 0, 1))


def test_what_is_generated_goes_on_where_a_video_ends(model, film, subtests):
    for demonstrated, given_from, expected in [
        (None, None, [4, 5]),
        ("other", None, [4, 5]),
        ("clip", None, [0, 1]),
        (None, "start", [0, 1]),
        ("clip", "end", [4, 5]),
    ]:
        with subtests.test(demonstrated=demonstrated, given_from=given_from, expected=expected):
            location, pixels = film(6, name="clip")
            places = {"clip": location, "other": film(5, name="other")[0], None: None}
            metadata = {"num_given_frames": 2} | ({} if given_from is None else {"given_from": given_from})
            row = Prompt(text="red", media=(location,), demonstration=places[demonstrated], metadata=metadata)
            given = array(model.encode(row), "given")[:, :2]
            torch.testing.assert_close(given, pixels[expected].permute(3, 0, 1, 2))


def test_what_stands_in_given_frames_changes_nothing(model, module, film):
    location, _ = film(4)
    payload = model.encode(Prompt(text="red", media=(location,), metadata={"num_given_frames": 2}))
    latents = torch.randn(1, 3, 4, 8, 8)
    others = latents.clone()
    others[:, :, :2] = 7.0
    with torch.no_grad():
        found = [
            model.velocity(module, each, torch.tensor([0.6]), [payload], guidance=2.0) for each in (latents, others)
        ]
    assert torch.equal(*found)
    assert not found[0][:, :, :2].any()


def test_log_probs_leave_given_frames_out(model, module, film):
    location, _ = film(4)
    row = Prompt(text="red", demonstration=location, metadata={"num_given_frames": 3})
    payload = model.noised(model.encode_demonstration(row), 3, num_decisions=2)
    (batch,) = model.pack([payload], budget=9)
    with torch.no_grad():
        velocity = model.velocity(module, batch.inputs["latents"], batch.inputs["times"], [payload] * 2, guidance=0.0)
        found = model.decide(module, batch, temperature=1.0).logprobs_N
    error = (velocity - batch.inputs["targets"])[:, :, 3] ** 2
    torch.testing.assert_close(found, -error.mean((1, 2, 3)), rtol=1e-5, atol=1e-6)


def test_an_embedding_from_a_file_comes_first(model, tmp_path):
    save_file({"text": torch.full((2, 16), 0.5)}, tmp_path / "text.safetensors")
    row = Prompt(text="red", metadata={"text_embedding": str(tmp_path / "text.safetensors")})
    assert array(model.encode(row), "text").tolist() == torch.full((2, 16), 0.5).tolist()


def test_what_cannot_be_used_is_refused(model, film, subtests):
    for row, said in [
        ({"text": (Message(role="user", content="red"),)}, "a caption: plain text"),
        ({"text": "one two three four five"}, "5 words, and .*text_length is 4"),
        ({"demonstration": None}, "no demonstration"),
        ({"demonstration": "short"}, "3 frames .* fewer than the 4 .*too short"),
        ({"demonstration": "/nowhere/clip.mp4"}, "'/nowhere/clip.mp4': no such file"),
        ({"media": ("short", "short")}, "2 media in a row"),
        ({"media": ("short",), "metadata": {"num_given_frames": 4}}, "num_given_frames is 4; it is a number"),
        ({"media": ("short",), "metadata": {"given_from": "middle"}}, "given_from is 'middle'; frames are given from"),
        ({"media": ("short",), "metadata": {"num_given_frames": "1"}}, "num_given_frames is '1'"),
    ]:
        with subtests.test(row=row, said=said):
            short = film(3, name="short")[0]
            places = {"short": short}
            given = {"text": "red", "demonstration": film(4)[0], **row}
            given["demonstration"] = places.get(given["demonstration"], given["demonstration"])
            given["media"] = tuple(places.get(each, each) for each in given.get("media", ()))
            with pytest.raises(DataError, match=said):
                model.encode_demonstration(Prompt(**given))


def test_frames_of_no_video_are_refused(model):
    with pytest.raises(DataError, match="neither media nor a demonstration"):
        model.encode(Prompt(text="red", metadata={"num_given_frames": 1}))


def test_other_models_of_the_family_are_refused(make, subtests):
    for change, said in [
        ({"in_channels": 3}, "one that says which frames are given"),
        ({"patch_size": [2, 2, 2]}, "each latent frame has a time"),
        ({"img_context_dim_in": 8}, "another Cosmos model"),
    ]:
        with subtests.test(change=change, said=said), pytest.raises(ConfigError, match=said):
            make(config={**tiny.CONFIG, **change}).facts()


def test_an_export_is_a_pipeline(make, checkpoint, tmp_path):
    path = checkpoint(tiny.pipeline(concat_padding_mask=True))
    model = make(path=path, height=16, width=16, num_frames=9, text="encoder", text_length=12)
    module = model.build(seed=0, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)
    model.export(module, tmp_path / "exported")
    pipeline = Cosmos2_5_PredictBasePipeline.from_pretrained(tmp_path / "exported", safety_checker=tiny.Unguarded())
    # The mask that is made here is the transformer's own again where others load it.
    assert pipeline.transformer.config["concat_padding_mask"]
    state = pipeline.transformer.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in canonical_tensors(module).items())


def test_captions_are_encoded_where_the_module_is(make, checkpoint):
    size = {"height": 16, "width": 16, "num_frames": 9, "text": "encoder", "text_length": 12}
    path, place = checkpoint(tiny.pipeline()), torch.device("meta")
    beside, away = (make(path=path, encoders=encoders, **size) for encoders in ("device", "cpu"))
    beside.device = away.device = place
    away.encode(Prompt(text="red"))
    # What is computed there cannot be brought back.
    with pytest.raises(NotImplementedError, match="meta tensor"):
        beside.encode(Prompt(text="red"))


def test_a_size_beyond_the_places_of_the_transformer_is_refused(make, subtests):
    # Of learned places there are [8, 16, 16], of rotary ones alone 16 of each.
    for places, size, told in [
        ("", {"height": 34}, "height: 34 makes 17 patches, and the transformer has places for 16 of them"),
        ("learnable", {"num_frames": 9}, "num_frames: 9 makes 9 patches, and the transformer has places for 8 of them"),
    ]:
        with subtests.test(places=places, size=size), pytest.raises(ConfigError, match=f"model.options.{told}"):
            make(config=tiny.CONFIG | {"extra_pos_embed_type": places}, **size).facts()
    assert make(num_frames=9).facts().latent_size == 3 * 9 * 8 * 8


def test_a_checkpoint_is_fetched_from_the_branch_that_has_it(make, checkpoint, tmp_path, monkeypatch):
    folder, asked = checkpoint(tiny.pipeline()), []

    def fetch(name, *, revision, **_):
        asked.append(revision)
        return folder if revision == "diffusers/base/post-trained" else str(tmp_path)

    monkeypatch.setattr("cosmos_core.models.weights.streaming.snapshot_download", fetch)
    monkeypatch.setattr("cosmos_core.models.weights.loading.get_hf_file_metadata", lambda url: None)
    size = {"height": 16, "width": 16, "num_frames": 9}
    for name in ("2B", "14B"):
        assert make(path=f"nvidia/Cosmos-Predict2.5-{name}", **size).facts().num_layers == 2
    assert set(asked) == {"diffusers/base/post-trained"}
    for path, revision, where in [
        ("nvidia/Cosmos-Predict2.5-2B", "main", "revision 'main'"),
        ("other/Cosmos-Predict2.5-2B", None, "the main branch"),
    ]:
        told = f"model.path: {where} of '{path}' on the hub has no transformer/.*; set model.options.revision"
        with pytest.raises(ConfigError, match=told):
            make(path=path, revision=revision, **size).facts()
