"""`cosmos generate` goes on from the images and videos that it is told."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cosmos_core.config.schema import ModelConfig, RolloutConfig
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.run.artifacts import generate

OPTIONS = {"num_frames": 4, "height": 8, "width": 8, "text": "table", "text_length": 2}


@pytest.fixture
def complete(make, tmp_path, monkeypatch):
    """Generate with an export of a run whose rows give so many frames; the frames that are made."""
    model = make(**OPTIONS)
    model.export(model.build(seed=0, dtype=torch.float32, device=torch.device("cpu")), tmp_path / "export")
    recipe = SimpleNamespace(model=ModelConfig(plugin="cosmos-predict", options=OPTIONS), rollout=RolloutConfig())
    made = []
    monkeypatch.setattr(generate, "write_media", lambda media, place: made.append(media.arrays["frames"].data) or place)

    def completed(*, of_run, **given):
        job = SimpleNamespace(recipe=recipe, uses_rollouts=False, given_frames=of_run)
        monkeypatch.setattr(generate, "run_of", lambda _: job)
        settings = {"plugin": None, "max_units": 2, "temperature": 0.0, "num_samples": 1, "seed": 0}
        generate.complete_prompts(tmp_path / "export", ["red"], output=tmp_path, **settings, **given)
        return np.frombuffer(made.pop(), np.uint8).reshape(4, 8, 8, 3)

    return completed


def test_it_goes_on_from_the_end_of_a_video(complete, tmp_path, subtests):
    film = np.random.default_rng(0).integers(0, 255, (6, 8, 8, 3), np.uint8)
    np.save(tmp_path / "film.npy", film)
    for of_run, told, expected in [(2, None, 2), (2, 3, 3), (0, 2, 2), (0, None, 1)]:
        with subtests.test(of_run=of_run, told=told):
            made = complete(of_run=of_run, media=[str(tmp_path / "film.npy")], given_frames=told)
            assert (made[:expected] == film[-expected:]).all()
            assert (made[expected] != film[-1]).any()
    assert complete(of_run=0).shape == film[:4].shape


def test_what_is_lacking_or_of_no_use_is_refused(complete, tmp_path):
    (tmp_path / "broken").write_bytes(b"\x89PNG of nothing")
    with pytest.raises(ConfigError, match="gives 2 frames to go on from; give some with --image FILE or --video FILE"):
        complete(of_run=2)
    with pytest.raises(ConfigError, match="--given-frames: it is of a video"):
        complete(of_run=0, given_frames=2)
    for name, told in [("broken", "no readable image"), ("missing", "no such file")]:
        with pytest.raises(DataError, match=told):
            complete(of_run=0, media=[str(tmp_path / name)])
