"""Modules that the server of forked commands imports once, with one thread each."""

import importlib

import torch

from cosmos_core.testing.worlds import PRELOADED

for name in PRELOADED:
    importlib.import_module(name)
torch.set_num_threads(1)
