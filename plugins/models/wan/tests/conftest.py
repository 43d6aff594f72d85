"""Tiny Wan models, and folders of whole checkpoints."""

import tempfile

import pytest
import torch

from cosmos_core.protocols import ModelContext
from cosmos_model_wan import WanModel, WanOptions
from cosmos_model_wan.tiny import CONFIG, OPTIONS


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors are slower on many threads."""
    torch.set_num_threads(1)


@pytest.fixture
def make(tmp_path):
    """`make()` makes a tiny model, `make(config=..., option=value)` another one, `make(path=...)` a checkpoint's."""

    def make(config=CONFIG, path=None, **changes):
        context = ModelContext(path=path, config=None if path else config, assets=tmp_path / "assets")
        return WanModel(WanOptions(**OPTIONS | changes), context)

    return make


@pytest.fixture
def model(make):
    return make()


@pytest.fixture
def module(model):
    return model.build(seed=0, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture
def checkpoint(tmp_path):
    """Saves each pipeline in a folder of its own, and gives that."""

    def saved(pipeline):
        folder = tempfile.mkdtemp(prefix="checkpoint-", dir=tmp_path)
        pipeline.save_pretrained(folder)
        return folder

    return saved
