"""A tiny model of each family, as planning makes it."""

import pytest
import torch

from cosmos_core.protocols import ModelContext
from cosmos_model_qwen_vl import QwenVLModel, QwenVLOptions
from cosmos_model_qwen_vl.tiny import CONFIGS, OPTIONS, TOKENIZER

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(params=sorted(CONFIGS))
def model(request, tmp_path):
    context = ModelContext(path=None, config=CONFIGS[request.param], assets=tmp_path / "assets")
    model = QwenVLModel(QwenVLOptions(**OPTIONS), context)
    model.prepare(["Which colour? red, blue and 12 or 34 at 0.5 seconds"], TOKENIZER)
    return model


@pytest.fixture
def module(model):
    return model.build(seed=0, dtype=torch.float32, device=CPU)
