"""Tiny Cosmos-Predict models, and folders of whole checkpoints."""

import pytest

from cosmos_core.testing.families import checkpoint, make_tiny, model, module, one_thread  # noqa: F401 - fixtures
from cosmos_model_cosmos_predict import CosmosPredictModel, CosmosPredictOptions
from cosmos_model_cosmos_predict.tiny import CONFIG, OPTIONS


@pytest.fixture
def make(tmp_path):
    return make_tiny(CosmosPredictModel, CosmosPredictOptions, CONFIG, OPTIONS, tmp_path)
