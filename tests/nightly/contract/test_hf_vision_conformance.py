"""The built-in `hf` keeps the protocol of models with a vision-language checkpoint, too."""

from inspect import signature

import pytest
import torch
from transformers import AutoModelForImageTextToText

from cosmos_core.models import values
from cosmos_core.models.tokens import view
from cosmos_core.protocols import Decided, ModelContext
from cosmos_core.testing import ModelConformance
from tests.vision import checkpoint, prompts


def own_inputs(payload, forward):
    """What transformers' own forward takes of a payload."""
    ids = torch.tensor([*values(payload, "prompt").tolist(), *values(payload, "completion").tolist()])
    media = {
        name.removeprefix("media."): torch.from_numpy(view(payload, name).copy())
        for name in payload.arrays
        if name.startswith("media.")
    }
    kinds = torch.zeros_like(ids)
    if media:
        prompt = values(payload, "kinds")
        kinds[: len(prompt)] = torch.from_numpy(prompt.copy())
    given = {"input_ids": ids[None], "mm_token_type_ids": kinds[None], **media}
    return {name: value for name, value in given.items() if name in signature(forward).parameters}


class TestQwen3VL(ModelConformance):
    """Layouts have a test of their own."""

    plugin = "hf"
    tokenizer = None
    test_declared_mesh_axes_equal_one_process = None

    @pytest.fixture
    def context(self, tmp_path):
        folder = checkpoint(tmp_path / "qwen3_vl", "qwen3_vl")
        return ModelContext(path=str(folder), config=None, assets=tmp_path / "none")

    @pytest.fixture
    def prompts(self):
        return tuple(prompts())

    def reference(self, model, module, payloads, *, temperature):
        module.set_attn_implementation("sdpa")
        found = []
        for payload in payloads:
            completion = torch.tensor(values(payload, "completion").tolist())
            with torch.no_grad():
                logits_UV = module(**own_inputs(payload, module.forward), use_cache=False).logits[0]
            logprobs_NV = (logits_UV[len(values(payload, "prompt")) - 1 : -1] / temperature).log_softmax(-1)
            found.append(
                Decided(
                    logprobs_N=logprobs_NV.gather(1, completion[:, None])[:, 0],
                    entropy_N=-(logprobs_NV.exp() * logprobs_NV).sum(-1),
                )
            )
        module.set_attn_implementation({"": "cosmos_packed", "text_config": "cosmos_packed", "vision_config": "sdpa"})
        return found

    def load_exported(self, directory):
        loaded, report = AutoModelForImageTextToText.from_pretrained(
            directory, dtype=torch.float32, output_loading_info=True
        )
        return {name: tensor for name, tensor in loaded.state_dict().items() if name not in report["missing_keys"]}
