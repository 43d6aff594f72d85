"""`cosmos generate`: texts, and the images and videos of world models, which become files."""

import contextlib
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch

from cosmos_core import devices
from cosmos_core.config.loading import load_job, save_job
from cosmos_core.config.schema import EngineConfig, ModelConfig, RolloutConfig
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import ModelContext
from cosmos_model_cosmos_predict import tiny as cosmos_predict
from cosmos_model_wan import tiny as wan
from cosmos_service_tools import generation, served

SETTINGS = {"plugin": None, "max_units": 2, "temperature": 0.0, "num_samples": 1, "seed": 0}
WAN = {"num_frames": 5, "height": 16, "width": 16, "text": "table", "text_length": 2}
PREDICT = {"num_frames": 4, "height": 8, "width": 8, "text": "table", "text_length": 2}


@pytest.fixture
def export(tmp_path, monkeypatch):
    """Export a tiny world model as if of a run whose recipe names no engine; the folder."""
    torch.set_num_threads(1)

    def exported(plugin, config, options, given_frames=0):
        context = ModelContext(path=None, config=config, assets=tmp_path / "assets")
        made = PluginSet.load([("model", plugin)]).create("model", plugin, options, context, "model.options")
        made.export(made.build(seed=0, dtype=torch.float32, device=torch.device("cpu")), tmp_path / "export")
        recipe = SimpleNamespace(model=ModelConfig(plugin=plugin, options=options), rollout=RolloutConfig())
        job = SimpleNamespace(recipe=recipe, uses_rollouts=False, given_frames=given_frames)
        monkeypatch.setattr(generation, "run_of", lambda _: job)
        return tmp_path / "export", job

    return exported


@pytest.fixture
def videos(export):
    """Complete prompts by a model of captions."""
    folder, _ = export("wan", wan.CONFIG, wan.OPTIONS | WAN)

    def completed(output, prompts=("red", "blue"), **changed):
        return generation.complete_prompts(folder, prompts, output=output, **SETTINGS | changed)

    return completed


@pytest.fixture
def frames(export, tmp_path, monkeypatch):
    """Complete a prompt by a model that goes on from frames, of a run whose rows give so many; the frames."""
    folder, job = export("cosmos-predict", cosmos_predict.CONFIG, cosmos_predict.OPTIONS | PREDICT)
    made = []
    monkeypatch.setattr(
        generation, "write_media", lambda media, place: made.append(media.arrays["frames"].data) or place
    )

    def completed(*, of_run, **given):
        job.given_frames = of_run
        generation.complete_prompts(folder, ["red"], output=tmp_path, **SETTINGS, **given)
        return np.frombuffer(made.pop(), np.uint8).reshape(4, 8, 8, 3)

    return completed


def test_a_model_of_text_is_shown_nothing(tmp_path, monkeypatch):
    served = contextlib.nullcontext(SimpleNamespace(model=object()))
    monkeypatch.setattr(generation, "serve", lambda *_: served)
    settings = SETTINGS | {"plugin": "hf", "output": tmp_path}
    with pytest.raises(ConfigError, match="--image, --video: models of plugin 'hf' are not shown any; leave them out"):
        generation.complete_prompts(tmp_path, ["red"], media=["x.png"], **settings)
    with pytest.raises(ConfigError, match="--given-frames: it is of a video that a world model is given"):
        generation.complete_prompts(tmp_path, ["red"], media=["x.png"], given_frames=2, **settings)


def test_a_system_turn_comes_before_each_prompt(tmp_path, monkeypatch):
    heard = []
    served = SimpleNamespace(
        model=SimpleNamespace(encode=lambda prompt: heard.append(prompt.text)),
        complete=lambda payloads, sampling, seeds: [[] for _ in payloads],
    )
    monkeypatch.setattr(generation, "serve", lambda *_: contextlib.nullcontext(served))
    settings = SETTINGS | {"plugin": "hf", "output": tmp_path}
    generation.complete_prompts(tmp_path, ["red", "blue"], system="Be brief.", **settings)
    generation.complete_prompts(tmp_path, ["red"], **settings)
    first, second, plain = heard
    assert [[(turn.role, turn.content) for turn in turns] for turns in (first, second)] == [
        [("system", "Be brief."), ("user", "red")],
        [("system", "Be brief."), ("user", "blue")],
    ]
    assert plain == "red"


def test_videos_are_written_and_named(videos, tmp_path, subtests):
    for temperature in [0.0, 1.0]:
        with subtests.test(temperature=temperature):
            folder = tmp_path / f"videos at {temperature}"
            found = videos(folder, num_samples=2, temperature=temperature)
            assert [len(each) for each in found] == [2, 2]
            assert {str(path) for path in folder.iterdir()} == {name for each in found for name in each}
            assert len({path.read_bytes() for path in folder.iterdir()}) == 4


def test_a_sample_is_that_of_the_next_seed(videos, tmp_path, monkeypatch):
    shown = []

    def write(media, place):
        shown.append(bytes(media.arrays["frames"].data))
        return place

    monkeypatch.setattr(generation, "write_media", write)
    videos(tmp_path, num_samples=2, prompts=["red"])
    videos(tmp_path, prompts=["red", "red"])
    assert shown[:2] == shown[2:]
    assert shown[0] != shown[1]


def test_a_model_of_captions_alone_takes_no_media(videos, tmp_path):
    with pytest.raises(DataError, match="the model takes no images or videos"):
        videos(tmp_path, media=[str(tmp_path)])


def test_a_place_that_cannot_be_written_to_is_named(videos, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match=r"--output: .*taken.* cannot be written"):
        videos(tmp_path / "taken")


def test_the_runs_own_engine_denoises_where_it_can():
    def job(plugin):
        rollout = RolloutConfig(engine=EngineConfig(plugin=plugin, options={"shift": 1.0}))
        return SimpleNamespace(recipe=SimpleNamespace(rollout=rollout))

    assert generation._engine(job("diffusion"), is_text=False).options == {"shift": 1.0}
    for other in (job("embedded"), None):
        assert generation._engine(other, is_text=False) == EngineConfig(plugin="diffusion")


def test_it_goes_on_from_the_end_of_a_video(frames, tmp_path, subtests):
    film = np.random.default_rng(0).integers(0, 255, (6, 8, 8, 3), np.uint8)
    np.save(tmp_path / "film.npy", film)
    for of_run, told, expected in [(2, None, 2), (2, 3, 3), (0, 2, 2), (0, None, 1)]:
        with subtests.test(of_run=of_run, told=told):
            made = frames(of_run=of_run, media=[str(tmp_path / "film.npy")], given_frames=told)
            assert (made[:expected] == film[-expected:]).all()
            assert (made[expected] != film[-1]).any()
    assert frames(of_run=0).shape == film[:4].shape


def test_what_is_lacking_or_of_no_use_is_refused(frames, tmp_path):
    (tmp_path / "broken").write_bytes(b"\x89PNG of nothing")
    with pytest.raises(ConfigError, match="gives 2 frames to go on from; give some with --image FILE or --video FILE"):
        frames(of_run=2)
    with pytest.raises(ConfigError, match="--given-frames: it is of a video"):
        frames(of_run=0, given_frames=2)
    for name, told in [("broken", "no readable image"), ("missing", "no such file")]:
        with pytest.raises(DataError, match=told):
            frames(of_run=0, media=[str(tmp_path / name)])


def test_what_a_run_learned_otherwise_is_said(cosmos, plain_export, caplog):
    for more, remark in ([[], []], [["--chat"], ["run mine learned from plain prompts"]]):
        cosmos("generate", plain_export, "3 + 4", *more)
        assert caplog.messages == remark
        caplog.clear()
    saved = load_job(plain_export.parent)
    save_job(attrs.evolve(saved, is_plain=False))
    cosmos("generate", plain_export, "3 + 4", "--max-units", 2)
    assert caplog.messages == ["run mine learned from chats; --chat puts a prompt in their template"]
    assert "-e reads it as a line break" in cosmos("generate", plain_export, "3 + 4\\n", "--chat")
    assert "--max-units" in cosmos("generate", plain_export, "3 + 4", "--max-units", 0, code=2)


def test_an_export_of_a_config_alone_is_served(export, monkeypatch):
    folder, job = export("wan", wan.CONFIG, wan.OPTIONS)
    with served.serve(folder, job.recipe.model, EngineConfig(plugin="diffusion")) as made:
        assert made.model.context.path == str(folder)
    # A GPU that torch does not see is told, never passed over.
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "_signs", lambda: "/dev/nvidia0")
    with (
        pytest.raises(ConfigError, match=r"device: 'auto', but torch sees no GPU, .* /dev/nvidia0.* an empty CUDA"),
        served.serve(folder, job.recipe.model, EngineConfig(plugin="diffusion")),
    ):
        pass
