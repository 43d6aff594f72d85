"""The protocol of models, and layouts, by the transformer as diffusers calls it."""

import pytest

from cosmos_core.testing import DenoisingModelConformance
from cosmos_model_wan.tiny import CONFIG, OPTIONS

pytestmark = pytest.mark.nightly


class TestWan(DenoisingModelConformance):
    plugin = "wan"
    config = CONFIG

    @pytest.fixture
    def options(self):
        return {**OPTIONS, "negative_prompt": "grey"}

    def forward(self, module, latents, time, text):
        return module(hidden_states=latents, timestep=1000 * time, encoder_hidden_states=text, return_dict=False)[0]

    def guided(self, velocity, negative, guidance):
        return negative + guidance * (velocity - negative)
