"""The embedded engine keeps its whole contract with prompts that show images and videos."""

import pytest

from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import ModelContext
from cosmos_core.testing import EngineConformance
from cosmos_core.types import Prompt
from cosmos_model_qwen_vl.tiny import CONFIGS, OPTIONS, TOKENIZER, data_url, film, picture

pytestmark = pytest.mark.nightly


class MediaConformance(EngineConformance):
    """Prompts enter whole."""

    plugin = "embedded"
    family = ""

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory):
        context = ModelContext(path=None, config=CONFIGS[cls.family], assets=tmp_path_factory.mktemp("model"))
        model = PluginSet.load([("model", "qwen-vl")]).create("model", "qwen-vl", OPTIONS, context)
        model.prepare(["Which colour? red, blue and 12 or 34 at 0.5 seconds"], TOKENIZER)
        return model

    @pytest.fixture
    def prompts(self, model, tmp_path):
        images = [data_url(picture(width, height, seed)) for seed, (width, height) in enumerate(((30, 20), (16, 16)))]
        video = film(tmp_path / "film", 3, 16, 8)
        rows = (
            Prompt(text="Which colour?", media=(images[0],)),
            Prompt(text="x"),
            Prompt(text="<image> or <image>", media=tuple(images)),
            Prompt(text="And then?", media=(video,)),
            Prompt(text="<video><image>", media=(video, images[1])),
        )
        return [model.encode(row) for row in rows]


class TestQwen25(MediaConformance):
    family = "qwen2_5_vl"


class TestQwen3InSmallSteps(MediaConformance):
    """Prompts enter in pieces, images cut anywhere."""

    family = "qwen3_vl"

    @pytest.fixture
    def options(self):
        return {"prefill_units": 7, "cache_step": 8}
