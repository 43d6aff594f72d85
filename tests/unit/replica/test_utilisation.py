from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import psutil
import torch

from cosmos_core.replica import utilisation
from cosmos_core.rollout.replica import ReplicaMetrics


def test_memory_without_a_gpu_is_that_of_the_process():
    (name, found), *_ = utilisation.memory().items()
    assert name == "memory_bytes"
    assert found >= psutil.Process().memory_info().rss * 0.9


def test_memory_of_an_engines_own_processes_is_not_told():
    parts = MagicMock(recipe=SimpleNamespace(rollout=SimpleNamespace(mesh=SimpleNamespace(tp=1))))
    metrics = ReplicaMetrics(parts, MagicMock(), MagicMock(), None)
    assert "memory_bytes" in metrics.gauges()
    parts.recipe.rollout.mesh.tp = 2
    assert "memory_bytes" not in metrics.gauges()


def test_a_peak_is_that_of_the_named_device_or_none(monkeypatch):
    assert utilisation.peak_of(torch.device("cpu")) == 0
    for name, peak in [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce GTX 1080", 0),
    ]:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert utilisation.peak_of(torch.device("cuda")) == peak, name
