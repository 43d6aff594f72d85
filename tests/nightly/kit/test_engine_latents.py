"""The engine kit knows no tokens that it was not told of: an engine of latents passes it."""

from pathlib import Path

import pytest

from cosmos_core.protocols.quantization import FORMATS

HERE = Path(__file__).parent
HEADER = """
from faulty_engine_denoiser import Denoiser
from cosmos_core.protocols import ModelContext, NoOptions
"""
BODY = """
long_units = 60

@pytest.fixture(scope="class")
@classmethod
def model(cls, tmp_path_factory):
    context = ModelContext(path=None, config={"width": 6}, assets=tmp_path_factory.mktemp("model"))
    return Denoiser(NoOptions(), context)

def content(self, generated):
    return bytes(generated.payload.arrays["path"].data)
"""


@pytest.mark.slow
def test_an_engine_of_latents_passes(run_kit):
    modules = {"latents": (HERE / "latent_engine.py").read_text(), "denoiser": (HERE / "latent_model.py").read_text()}
    # The model is only imported; it stands among the engines because all of them are made importable.
    bodies = {"denoiser": "__test__ = False\n"}
    outcomes = run_kit("engine", modules, header=HEADER, body=BODY, bodies=bodies)["latents"]
    assert [(each.test, each.message) for each in outcomes if each.result == "failed"] == []
    assert {each.message for each in outcomes if each.result == "skipped"} == {
        "not declared: payload kind tokens",
        "not declared: it has no preflight (`Provider.preflight`)",
        *(f"not declared: quantization {name}" for name in FORMATS),
    }
