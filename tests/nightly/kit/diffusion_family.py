"""A family of world models on `DiffusionModel`, as small as one can be: a transformer without attention.

Shape legend: B latents of a batch, C channels, T latent frames, H and W latent height and width, L tokens of the text,
E their width.
"""

import attrs
from torch import nn

from cosmos_core.models.diffusion import DiffusionModel, DiffusionOptions
from cosmos_core.protocols import ModelCapabilities, Provider, hookimpl

WIDTH = 16


class Flow(nn.Module):
    """Its blocks see one place each, with the time and the mean of the text."""

    def __init__(
        self, in_channels=3, out_channels=3, patch_size=(1, 1, 1), num_attention_heads=1, attention_head_dim=WIDTH
    ):
        super().__init__()
        self.into = nn.Linear(in_channels, WIDTH)
        self.text = nn.Linear(4, WIDTH, bias=False)
        blocks = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(4)]
        self.blocks = nn.ModuleList(blocks)
        self.out = nn.Linear(WIDTH, out_channels)

    def forward(self, latents_B, times_B, text_BLE):
        beside_B = times_B[:, None] + 4 * self.text(text_BLE.mean(1))
        hidden_B = self.into(latents_B.movedim(1, -1)) + beside_B[:, None, None, None]
        for block in self.blocks:
            hidden_B = hidden_B + block(hidden_B)
        return self.out(hidden_B).movedim(-1, 1)


class Family(DiffusionModel):
    layers = "blocks"
    transformer = Flow
    neutral_guidance = 1.0
    text_width = 4

    def denoise(self, module, latents_B, times_B, text_BLE, conditions):
        return type(module).forward(module, latents_B, times_B.to(latents_B.dtype), text_BLE)

    def guide(self, velocity_B, negative_B, guidance):
        return negative_B + guidance * (velocity_B - negative_B)

    def encode_words(self, words):
        raise AssertionError("its texts are those of a table")

    def facts(self):
        facts = super().facts()
        return attrs.evolve(facts, parts=tuple(attrs.evolve(part, kept=self.said(part.kept)) for part in facts.parts))

    def said(self, kept):
        return kept


@hookimpl
def cosmos_model():
    return Provider(
        create=Family,
        options=DiffusionOptions,
        capabilities=ModelCapabilities(payload_kinds=frozenset({"latents"})),
    )
