"""The velocity is that of the diffusers pipelines, step by step: guidance and images included."""

import numpy as np
import torch
from PIL import Image

from cosmos_core.types import Prompt
from cosmos_model_wan import tiny
from cosmos_model_wan.encoders import cleaned

SIZE = {"height": 16, "width": 16, "num_frames": 5, "text": "encoder"}


def run_recorded(pipeline, **arguments):
    """Run a pipeline; of each step the latents before it, their sigma, and the velocity that it used."""
    steps, step = [], pipeline.scheduler.step

    def recorded(velocity, time, latents, **others):
        steps.append((latents.clone(), pipeline.scheduler.sigmas[len(steps)], velocity.clone()))
        return step(velocity, time, latents, **others)

    pipeline.scheduler.step = recorded
    pipeline.set_progress_bar_config(disable=True)
    result = pipeline(
        prompt="a red video", negative_prompt="a blue", height=16, width=16, num_frames=5, num_inference_steps=3,
        generator=torch.Generator().manual_seed(1), max_sequence_length=512, output_type="np", **arguments,
    ).frames[0]  # fmt: skip
    return steps, result


def compare(model, steps, payload, guidance):
    module = model.build(seed=0, dtype=torch.float32, device=torch.device("cpu"))
    assert len(steps) == 3
    for latents, time, expected in steps:
        with torch.no_grad():
            found = model.velocity(module, latents, time[None], [payload], guidance=guidance)
        # Float32 kernels sum in another order on another processor: a few units in the last place of values near 1.
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=4e-6)


def test_text_to_video(make, checkpoint, subtests):
    for guidance in [1.0, 4.5]:
        with subtests.test(guidance=guidance):
            pipeline = tiny.pipeline()
            model = make(path=checkpoint(pipeline), text_length=512, negative_prompt="a blue", **SIZE)
            steps, frames = run_recorded(pipeline, guidance_scale=guidance)
            payload = model.encode(Prompt(text="a red  video"))
            compare(model, steps, payload, guidance)
            # What the pipeline shows is what the model renders of the latents after the last step.
            latents, time, velocity = steps[-1]
            shown = model.render((latents - time * velocity)[0], payload)
            found = np.frombuffer(shown.arrays["frames"].data, np.uint8).reshape(shown.arrays["frames"].shape)
            np.testing.assert_allclose(found / 255, frames, atol=1 / 255)


def test_image_to_video(make, checkpoint, tmp_path, monkeypatch, subtests):
    for attends in [False, True]:
        with subtests.test(attends=attends), monkeypatch.context() as patch:
            # This pipeline, unlike the other, cleans captions with ftfy whether it is installed or not.
            patch.setattr("diffusers.pipelines.wan.pipeline_wan_i2v.prompt_clean", cleaned)
            tower = {"image_dim": tiny.IMAGE_WIDTH, "added_kv_proj_dim": 24} if attends else {}
            pipeline = tiny.pipeline(in_channels=12, **tower)
            model = make(path=checkpoint(pipeline), text_length=512, negative_prompt="a blue", **SIZE)
            pixels = np.random.default_rng(0).integers(0, 255, (16, 16, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "image.png")
            steps, _ = run_recorded(pipeline, guidance_scale=3.0, image=Image.fromarray(pixels))
            payload = model.encode(Prompt(text="a red video", media=(str(tmp_path / "image.png"),)))
            compare(model, steps, payload, 3.0)
