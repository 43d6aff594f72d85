"""Every reward of the package keeps the protocol of rewards."""

import math
import sys

import numpy as np
import pytest

from cosmos_core.protocols import Completion
from cosmos_core.testing import RewardConformance
from cosmos_core.testing.conformance.reward import shown_as
from cosmos_core.types import Array, Payload, Prompt

pytestmark = pytest.mark.nightly

READER = """
class RapidOCR:
    def __call__(self, picture):
        if not picture.any():
            return None, 0.0
        return [[None, "GO", "0.9"], [None, "garbage", "0.1"]], [0.0, 0.0, 0.0]
"""
WHITE = np.full((2, 4, 4, 3), 255, np.uint8)


def of(frames, text="a thing", reference=None):
    shown = shown_as(frames)
    return Completion(prompt=Prompt(text=text, reference=reference), text="", media=shown.media)


class TestColour(RewardConformance):
    plugin = "colour"
    reference_is_optional = True
    examples = (
        (of(WHITE, "white as snow"), 0.0),
        (of(WHITE, "a Black cat"), -2.0 * math.sqrt(3.0)),
        (of(WHITE, "a red ball", "blue"), -math.sqrt(8.0)),
    )
    unscorable = (of(WHITE), of(WHITE, "a red and a blue ball"), of(WHITE, "red", "reddish"), of(WHITE, "red", [1, 2]))


class TestBrightness(RewardConformance):
    plugin = "brightness"
    examples = ((of(WHITE), 1.0), (of(WHITE // 5), 0.2))


class TestSharpness(RewardConformance):
    plugin = "sharpness"
    examples = ((of(WHITE), 0.0),)
    unscorable = (of(WHITE[:, :2]),)


class TestJpeg(RewardConformance):
    plugin = "jpeg-compressibility"


class TestSteadiness(RewardConformance):
    plugin = "temporal-consistency"
    examples = ((of(WHITE), 0.0), (of(np.stack([WHITE[0], WHITE[0] // 5])), -0.8))
    unscorable = (of(WHITE[:1]),)


def of_latents(values):
    """A completion of latents [T, values], of one channel and row."""
    latents = np.asarray(values, np.float32)[None, :, None]
    array = Array(dtype="float32", shape=latents.shape, data=memoryview(bytearray(latents.tobytes())))
    return Completion(prompt=Prompt(text="?"), text="", payload=Payload(kind="latents", arrays={"sample": array}))


class TestLatentSteadiness(RewardConformance):
    plugin = "latent-temporal-consistency"
    examples = (
        (of_latents([[3, 4], [6, 8]]), 0.0),
        (of_latents([[1, 0], [0, 2], [0, -5]]), -1.5),
    )
    unscorable = (of_latents([[1, 2]]), of_latents([[1, 2], [0, 0]]), of(WHITE))

    @pytest.fixture
    def completions(self):
        draw = np.random.default_rng(0)
        return [of_latents(draw.normal(size=(number, 6))) for number in (2, 3, 9)]


class TestDecoded(RewardConformance):
    plugin = "decoded"
    timeout_s = 30.0
    unscorable = (of_latents([[1, 2]]),)

    @pytest.fixture
    def options(self, wan):
        size = {"height": 16, "width": 16, "num_frames": 9}
        return {"reward": "brightness", "model": "wan", "path": str(wan), "model_options": size}

    @pytest.fixture
    def completions(self):
        latents = np.random.default_rng(0).normal(size=(4, 3, 2, 2)).astype(np.float32)
        array = Array(dtype="float32", shape=latents.shape, data=memoryview(bytearray(latents.tobytes())))
        payload = Payload(kind="latents", arrays={"sample": array})
        return [of(WHITE), Completion(prompt=Prompt(text="?"), text="", payload=payload)]


class TestClip(RewardConformance):
    plugin = "clip-similarity"
    timeout_s = 30.0

    @pytest.fixture
    def options(self, clip):
        return {"path": str(clip)}


class TestOcr(RewardConformance):
    plugin = "ocr"
    reference_is_optional = True
    examples = ((of(WHITE, reference="g o"), 1.0), (of(WHITE, 'It says "GOAL".'), 0.5), (of(WHITE * 0, 'a "b"'), 0.0))
    unscorable = (of(WHITE), of(WHITE, reference=" "), of(WHITE, reference=8))

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def reader(cls, tmp_path_factory):
        """What stands in for RapidOCR, here and in workers, installed as it would be."""
        folder = tmp_path_factory.mktemp("ocr")
        (folder / "rapidocr_onnxruntime.py").write_text(READER)
        metadata = folder / "rapidocr_onnxruntime-1.4.4.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text("Metadata-Version: 2.1\nName: rapidocr-onnxruntime\nVersion: 1.4.4\n")
        with pytest.MonkeyPatch.context() as changed:
            changed.syspath_prepend(str(folder))
            changed.setenv("PYTHONPATH", str(folder))
            changed.delitem(sys.modules, "rapidocr_onnxruntime", raising=False)
            yield
