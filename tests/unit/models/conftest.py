"""The config of a tiny model of transformers."""

import pytest
import torch

from tests.tiny import QWEN3

torch.set_num_threads(1)


@pytest.fixture
def config():
    return dict(QWEN3)
