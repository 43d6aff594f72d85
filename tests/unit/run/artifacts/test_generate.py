import contextlib
from types import SimpleNamespace

import pytest

from cosmos_core.errors import ConfigError
from cosmos_core.run.artifacts import generate


def test_a_model_of_text_is_shown_nothing(tmp_path, monkeypatch):
    served = contextlib.nullcontext(SimpleNamespace(model=object()))
    monkeypatch.setattr(generate, "serve", lambda *_: served)
    settings = {"plugin": "hf", "max_units": 2, "temperature": 0.0, "num_samples": 1, "seed": 0, "output": tmp_path}
    with pytest.raises(ConfigError, match="--image, --video: models of plugin 'hf' are not shown any; leave them out"):
        generate.complete_prompts(tmp_path, ["red"], media=["x.png"], **settings)
    with pytest.raises(ConfigError, match="--given-frames: it is of a video that a world model is given"):
        generate.complete_prompts(tmp_path, ["red"], media=["x.png"], given_frames=2, **settings)


def test_a_system_turn_comes_before_each_prompt(tmp_path, monkeypatch):
    heard = []
    served = SimpleNamespace(
        model=SimpleNamespace(encode=lambda prompt: heard.append(prompt.text)),
        complete=lambda payloads, sampling, seeds: [[] for _ in payloads],
    )
    monkeypatch.setattr(generate, "serve", lambda *_: contextlib.nullcontext(served))
    settings = {"plugin": "hf", "max_units": 2, "temperature": 0.0, "num_samples": 1, "seed": 0, "output": tmp_path}
    generate.complete_prompts(tmp_path, ["red", "blue"], system="Be brief.", **settings)
    generate.complete_prompts(tmp_path, ["red"], **settings)
    first, second, plain = heard
    assert [[(turn.role, turn.content) for turn in turns] for turns in (first, second)] == [
        [("system", "Be brief."), ("user", "red")],
        [("system", "Be brief."), ("user", "blue")],
    ]
    assert plain == "red"
