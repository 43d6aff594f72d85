import pytest
import torch

from cosmos_core.errors import ConfigError
from cosmos_core.policy.training.setup import choose_device


def test_cpu_where_asked_for_or_nothing_else_is_there(monkeypatch):
    assert choose_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="'cuda' is asked for"):
        choose_device("cuda")


def test_an_accelerator_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", 1)
