"""Parts that are never trained: when they are loaded, where they are, and who uses them."""

import threading

import pytest
import torch
from torch import nn

from cosmos_core.errors import CheckpointError, ConfigError
from cosmos_core.models.diffusion import checkpoint
from cosmos_core.models.diffusion.family import Family, Part
from cosmos_core.models.diffusion.options import DiffusionOptions


def where(part):
    with part.used() as (module, device):
        assert module.weight.device == device
        return device.type


def test_it_is_loaded_once_and_taken_where_it_works():
    loaded, devices = [], iter(("cpu", "meta", "meta"))
    part = Part(lambda: loaded.append(1) or nn.Linear(2, 2), lambda: torch.device(next(devices)))
    assert loaded == []
    assert [where(part) for _ in range(3)] == ["cpu", "meta", "meta"]
    assert loaded == [1]


def test_a_device_without_room_is_told_and_nothing_stays_there(monkeypatch):
    module, places = nn.Linear(2, 2), []

    def to(place):
        places.append(str(place))
        if str(place) == "meta":
            raise torch.OutOfMemoryError("Tried to allocate 22 GiB.")
        return module

    monkeypatch.setattr(module, "to", to)
    part = Part(lambda: module, lambda: torch.device("meta"), "; set encoders = 'cpu'")
    with pytest.raises(ConfigError, match=r"meta has no room for Linear; set encoders = 'cpu': Tried to allocate"):
        where(part)
    assert places == ["meta", "cpu"]


def test_one_thread_at_a_time_uses_it():
    part = Part(lambda: nn.Linear(2, 2), lambda: torch.device("cpu"))
    entered = threading.Event()

    def enter():
        with part.used():
            entered.set()

    other = threading.Thread(target=enter)
    with part.used():
        other.start()
        assert not entered.wait(0.1)
    other.join(10)
    assert entered.is_set()


def test_what_cannot_be_loaded_is_tried_again_the_next_time():
    answers = iter((CheckpointError("model.path: no such file"), nn.Linear(2, 2)))

    def load():
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    part = Part(load, lambda: torch.device("cpu"))
    with pytest.raises(CheckpointError, match="no such file"), part.used():
        pass
    assert where(part) == "cpu"


def test_a_part_leaves_the_device_while_its_model_sleeps_and_returns_when_it_is_used(tmp_path, monkeypatch):
    class Moved(nn.Module):
        def to(self, device):
            places.append(str(device))
            return self

    places = []
    monkeypatch.setattr(Family, "__abstractmethods__", frozenset())
    monkeypatch.setattr(checkpoint, "load_frozen", lambda *_, **__: Moved())
    monkeypatch.setattr(Family, "component", lambda self, name: tmp_path)
    painter = Family(DiffusionOptions(), None)
    part = painter.encoder("text_encoder", None)
    painter.device = torch.device("cuda")
    for act in (painter.sleep, painter.sleep, painter.wake, painter.wake):
        with part.used() as (_, device):
            places.append(f"used on {device}")
        act()
    with part.used():
        pass
    slept = ["cpu", "cpu", "used on cpu"] * 2
    assert places == ["cuda", "used on cuda", *slept, "cuda", "used on cuda", "cuda"]
