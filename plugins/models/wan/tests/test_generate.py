"""`cosmos generate` of a world model: what it makes becomes files, and it says which."""

from types import SimpleNamespace

import pytest
import torch

from cosmos_core.config.schema import EngineConfig, ModelConfig, RolloutConfig
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.run.artifacts import generate


def complete(folder, output, *, num_samples=1, temperature=0.0, prompts=("red", "blue"), media=()):
    return generate.complete_prompts(
        folder,
        prompts,
        plugin=None,
        max_units=2,
        temperature=temperature,
        num_samples=num_samples,
        seed=0,
        output=output,
        media=media,
    )


@pytest.fixture
def exported(make, tmp_path, monkeypatch):
    """An export of a run of demonstrations, whose engine is the one that recipes have if they name none."""
    options = {"num_frames": 5, "height": 16, "width": 16, "text": "table", "text_length": 2}
    model = make(**options)
    folder = tmp_path / "export"
    model.export(model.build(seed=0, dtype=torch.float32, device=torch.device("cpu")), folder)
    recipe = SimpleNamespace(model=ModelConfig(plugin="wan", options=options), rollout=RolloutConfig())
    monkeypatch.setattr(
        generate, "run_of", lambda _: SimpleNamespace(recipe=recipe, uses_rollouts=False, given_frames=0)
    )
    return folder


def test_videos_are_written_and_named(exported, tmp_path, subtests):
    for temperature in [0.0, 1.0]:
        with subtests.test(temperature=temperature):
            folder = tmp_path / f"videos at {temperature}"
            found = complete(exported, folder, num_samples=2, temperature=temperature)
            assert [len(each) for each in found] == [2, 2]
            assert {str(path) for path in folder.iterdir()} == {name for each in found for name in each}
            assert len({path.read_bytes() for path in folder.iterdir()}) == 4


def test_a_sample_is_that_of_the_next_seed(exported, tmp_path, monkeypatch):
    shown = []

    def write(media, place):
        shown.append(bytes(media.arrays["frames"].data))
        return place

    monkeypatch.setattr(generate, "write_media", write)
    complete(exported, tmp_path, num_samples=2, prompts=["red"])
    complete(exported, tmp_path, prompts=["red", "red"])
    assert shown[:2] == shown[2:]
    assert shown[0] != shown[1]


def test_a_model_of_captions_alone_takes_no_media(exported, tmp_path):
    with pytest.raises(DataError, match="the model takes no images or videos"):
        complete(exported, tmp_path, media=[str(tmp_path)])


def test_a_place_that_cannot_be_written_to_is_named(exported, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match=r"--output: .*taken.* cannot be written"):
        complete(exported, tmp_path / "taken")


def test_the_runs_own_engine_denoises_where_it_can():
    def job(plugin):
        rollout = RolloutConfig(engine=EngineConfig(plugin=plugin, options={"shift": 1.0}))
        return SimpleNamespace(recipe=SimpleNamespace(rollout=rollout))

    assert generate._engine(job("diffusion"), is_text=False).options == {"shift": 1.0}
    for other in (job("embedded"), None):
        assert generate._engine(other, is_text=False) == EngineConfig(plugin="diffusion")
