from __future__ import annotations

import torch

from cosmos_core.policy.training.executor import watch_layers
from cosmos_core.replica.activity import Activity


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.base = torch.nn.Module()
        self.base.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))

    def forward(self, x):
        for layer in self.base.layers:
            x = layer(x)
        return x


def test_each_layer_is_progress_whoever_calls_it():
    model, activity = Model(), Activity()
    watch_layers(model, activity)
    model(torch.zeros(1, 2))
    assert activity.pulse().progress == 4
    model.base.layers[1](torch.zeros(1, 2))
    assert activity.pulse().progress == 5
