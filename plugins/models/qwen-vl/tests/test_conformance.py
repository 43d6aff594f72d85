"""Both families keep the protocol of models, with rows that show something and rows that do not."""

import pytest
import torch
from transformers import AutoModelForImageTextToText

from cosmos_core.models import values
from cosmos_core.protocols import Decided
from cosmos_core.testing import ModelConformance
from cosmos_core.types import Message, Prompt
from cosmos_model_qwen_vl.alone import own_copy, own_logits
from cosmos_model_qwen_vl.tiny import OPTIONS, QWEN3, QWEN25, data_url, film, picture

pytestmark = pytest.mark.nightly


def decisions(logits_UV, payload, temperature):
    completion = torch.tensor(values(payload, "completion").tolist())
    logprobs_NV = (logits_UV[len(values(payload, "prompt")) - 1 : -1] / temperature).log_softmax(-1)
    return Decided(
        logprobs_N=logprobs_NV.gather(1, completion[:, None])[:, 0],
        entropy_N=-(logprobs_NV.exp() * logprobs_NV).sum(-1),
    )


class VisionConformance(ModelConformance):
    plugin = "qwen-vl"

    @pytest.fixture
    def options(self):
        return OPTIONS

    @pytest.fixture
    def prompts(self, tmp_path):
        images = tuple(data_url(picture(width, height)) for width, height in ((30, 20), (16, 16)))
        video = film(tmp_path / "film", 3, 16, 8)
        chat = (Message(role="user", content="What happens?"),)
        return (
            Prompt(text="Ann has 3 apples and buys 4 more. How many?", demonstration="3+4=7\n#### 7"),
            Prompt(text="Zoë zählt: 12, 13,", demonstration="14 😀"),
            Prompt(text="Which colour?", demonstration="red", media=images[:1]),
            Prompt(text="Between <image> and <image>?", demonstration="orange", media=images),
            Prompt(text=chat, demonstration="", media=(video,)),
            Prompt(text="A film <video> and an end: <image>", demonstration="both", media=(video, images[1])),
        )

    @pytest.fixture
    def corpus(self):
        return ("Which colour is between 12 and 34? red, orange. What happens in 0.5 seconds?",)

    def reference(self, model, module, payloads, *, temperature):
        alone = own_copy(module)
        with torch.no_grad():
            return [decisions(own_logits(alone, model, payload), payload, temperature) for payload in payloads]

    def load_exported(self, directory):
        loaded, report = AutoModelForImageTextToText.from_pretrained(
            directory, dtype=torch.float32, output_loading_info=True
        )
        return {name: tensor for name, tensor in loaded.state_dict().items() if name not in report["missing_keys"]}


class TestQwen25(VisionConformance):
    config = QWEN25


class TestQwen3(VisionConformance):
    config = QWEN3
