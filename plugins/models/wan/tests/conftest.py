"""Tiny Wan models, and folders of whole checkpoints."""

import pytest

from cosmos_core.testing.families import checkpoint, make_tiny, model, module, one_thread  # noqa: F401 - fixtures
from cosmos_model_wan import WanModel, WanOptions
from cosmos_model_wan.tiny import CONFIG, OPTIONS


@pytest.fixture
def make(tmp_path):
    return make_tiny(WanModel, WanOptions, CONFIG, OPTIONS, tmp_path)
