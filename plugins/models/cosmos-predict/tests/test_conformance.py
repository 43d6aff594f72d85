"""The protocol of models, and layouts, by the transformer as diffusers calls it."""

import pytest
import torch

from cosmos_core.testing import DenoisingModelConformance
from cosmos_model_cosmos_predict.tiny import CONFIG, OPTIONS

pytestmark = pytest.mark.nightly


class TestCosmosPredict(DenoisingModelConformance):
    plugin = "cosmos-predict"
    config = CONFIG

    @pytest.fixture
    def options(self):
        return {**OPTIONS, "negative_prompt": "grey"}

    def forward(self, module, latents, time, text):
        return module(
            hidden_states=latents,
            timestep=time,
            encoder_hidden_states=text,
            condition_mask=torch.zeros_like(latents[:, :1]),
            return_dict=False,
        )[0]

    def guided(self, velocity, negative, guidance):
        return velocity + guidance * (velocity - negative)
