"""The velocity is that of the diffusers pipeline, step by step: guidance and given frames included."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import Cosmos2_5_PredictBasePipeline
from diffusers.models.transformers import transformer_cosmos
from torch.nn import functional

from cosmos_core.models.diffusion import IS_GIVEN
from cosmos_core.types import Prompt
from cosmos_model_cosmos_predict import tiny

# The scheduler hands numpy tensors in a way that numpy warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

SIZE = {"height": 16, "width": 16, "num_frames": 9, "text": "encoder", "text_length": 12}


class Transforms:
    """What the transformer needs of torchvision: one resize of its padding mask."""

    class InterpolationMode:
        NEAREST = "nearest"

    class functional:  # noqa: N801
        @staticmethod
        def resize(mask, size, interpolation):
            return functional.interpolate(mask, size=size, mode=interpolation)


def run_recorded(pipeline, **arguments):
    """Run a pipeline; of each step the latents before it, their sigma, and the velocity that it used."""
    steps, step = [], pipeline.scheduler.step

    def recorded(velocity, time, latents, **others):
        steps.append((latents.clone(), pipeline.scheduler.sigmas[len(steps)], velocity.clone()))
        return step(velocity, time, latents, **others)

    pipeline.scheduler.step = recorded
    pipeline.set_progress_bar_config(disable=True)
    result = pipeline(
        prompt="a red video", negative_prompt="a blue", height=16, width=16, num_frames=9, num_inference_steps=3,
        generator=torch.Generator().manual_seed(1), max_sequence_length=12, output_type="np", **arguments,
    ).frames[0]  # fmt: skip
    return steps, result


def compare(model, steps, payload, guidance):
    module = model.build(seed=0, dtype=torch.float32, device=torch.device("cpu"))
    kept = model.conditioning(payload)[IS_GIVEN]
    assert len(steps) == 3
    for latents, time, expected in steps:
        with torch.no_grad():
            found = model.velocity(module, latents, time[None], [payload], guidance=guidance)
        torch.testing.assert_close(found[:, :, ~kept], expected[:, :, ~kept], rtol=1e-6, atol=1e-6)
        assert not found[:, :, kept].any()


def test_text_to_world(make, checkpoint, monkeypatch, subtests):
    for guidance, padded in [(0.0, False), (5.0, False), (5.0, True)]:
        with subtests.test(guidance=guidance, padded=padded), monkeypatch.context() as patch:
            patch.setattr(transformer_cosmos, "transforms", Transforms, raising=False)
            pipeline = tiny.pipeline(concat_padding_mask=padded)
            model = make(path=checkpoint(pipeline), negative_prompt="a blue", **SIZE)
            steps, frames = run_recorded(pipeline, guidance_scale=guidance)
            payload = model.encode(Prompt(text="a red video"))
            compare(model, steps, payload, guidance)
            latents, _, _ = steps[-1]
            shown = model.render(latents[0], payload)
            assert shown.arrays["frames"].shape == (9, 16, 16, 3) == frames.shape


def test_guidance_counts_where_the_pipeline_turns_it_off(model, module):
    """At 1 the pipeline uses none; here it is v + (v - v_neg), as the formula says."""
    assert not Cosmos2_5_PredictBasePipeline.do_classifier_free_guidance.fget(SimpleNamespace(_guidance_scale=1.0))
    prompt, negative = (model.encode(Prompt(text=text)) for text in ("red", model.options.negative_prompt or ""))
    latents, times = torch.randn(1, *model.shape), torch.tensor([0.5])
    with torch.no_grad():
        found = model.velocity(module, latents, times, [prompt], guidance=1.0)
        of_prompt, of_negative = (
            model.velocity(module, latents, times, [each], guidance=0.0) for each in (prompt, negative)
        )
    torch.testing.assert_close(found, 2 * of_prompt - of_negative)
    assert not torch.allclose(found, of_prompt)


def test_what_conditions_is_placed_once_for_all_steps(model, module, monkeypatch):
    asked, conditioning = [], model.conditioning
    monkeypatch.setattr(model._resident, "_conditioning", lambda each: asked.append(each) or conditioning(each))
    prompt = model.encode(Prompt(text="red"))
    latents, places = torch.randn(3, *model.shape), set()
    denoise = model.denoise

    def seen(module, latents_B, times_B, text_BLE, conditions):
        places.add(text_BLE.untyped_storage().data_ptr())
        assert "given" not in conditions
        return denoise(module, latents_B, times_B, text_BLE, conditions)

    monkeypatch.setattr(model, "denoise", seen)
    for time in (0.9, 0.5, 0.1):
        with torch.inference_mode():
            model.velocity(module, latents, torch.full((3,), time), [prompt] * 3, guidance=2.0)
    assert len(asked) == 1
    assert len(places) == 2


def test_given_frames(make, checkpoint, tmp_path, subtests):
    for number in [1, 5]:
        with subtests.test(number=number):
            pipeline = tiny.pipeline()
            model = make(path=checkpoint(pipeline), negative_prompt="a blue", **SIZE)
            frames = np.random.default_rng(0).integers(0, 255, (number, 16, 16, 3), np.uint8)
            np.save(tmp_path / "film.npy", frames)
            video = (torch.from_numpy(frames).float() / 127.5 - 1).permute(3, 0, 1, 2)[None]
            steps, _ = run_recorded(
                pipeline, guidance_scale=5.0, video=video, num_latent_conditional_frames=(number - 1) // 4 + 1
            )
            row = Prompt(text="a red video", media=(str(tmp_path / "film.npy"),), metadata={"num_given_frames": number})
            payload = model.encode(row)
            assert model.conditioning(payload)[IS_GIVEN].tolist() == [True] * ((number - 1) // 4 + 1) + [False] * (
                2 - (number - 1) // 4
            )
            compare(model, steps, payload, 5.0)


def test_learned_places_begin_with_gradients_like_others(make):
    model = make(config=tiny.CONFIG | {"extra_pos_embed_type": "learnable"})
    module = model.build(seed=0, dtype=torch.float32, device=torch.device("cpu"))
    payload = model.encode(Prompt(text="red"))
    latents = torch.randn(1, *model.shape, generator=torch.Generator().manual_seed(0))
    model.velocity(module, latents, torch.ones(1), [payload], guidance=0.0).square().sum().backward()
    norms = {name: float(each.grad.norm()) for name, each in module.named_parameters() if each.grad is not None}
    places = [norm for name, norm in norms.items() if name.startswith("learnable_pos_embed")]
    assert len(places) == 3
    assert 0 < max(places) < 100 * max(norm for name, norm in norms.items() if "pos_embed" not in name)
