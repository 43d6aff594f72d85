"""The diffusion engine keeps the promises of an engine, whatever its sampler is and whichever steps it records."""

from cosmos_core.testing import DenoisingEngineConformance


class TestDiffusion(DenoisingEngineConformance):
    plugin = "diffusion"
