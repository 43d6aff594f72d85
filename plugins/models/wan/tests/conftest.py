"""Tiny Wan models, and folders of whole checkpoints."""

import pytest
import torch

from cosmos_core.protocols import ModelContext
from cosmos_model_wan import WanModel, WanOptions
from cosmos_model_wan.tiny import CONFIG, OPTIONS


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def make(tmp_path):
    def made(config=CONFIG, path=None, **options):
        context = ModelContext(path=path, config=None if path else config, assets=tmp_path / "assets")
        return WanModel(WanOptions(**{**OPTIONS, **options}), context)

    return made


@pytest.fixture
def model(make):
    return make()


@pytest.fixture
def module(model):
    return model.build(seed=0, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture
def checkpoint(tmp_path):
    """Saves a pipeline and gives its folder."""

    def saved(pipeline):
        pipeline.save_pretrained(tmp_path / "checkpoint")
        return str(tmp_path / "checkpoint")

    return saved
