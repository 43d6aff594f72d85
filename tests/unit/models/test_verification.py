import pytest
import torch

from cosmos_core.errors import PluginIncompatibleError
from cosmos_core.models import HuggingFaceModel, HuggingFaceOptions, tokens_payload
from cosmos_core.protocols import ModelContext


def build(tmp_path, config, cls=HuggingFaceModel):
    model = cls(HuggingFaceOptions(), ModelContext(path=None, config=config, assets=tmp_path / "assets"))
    return model.build(seed=0, dtype=torch.float32, device=torch.device("cpu"))


WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def test_soft_caps_windows_and_sinks_give_transformers_own_logits(subtests, tmp_path, config):
    for number, (model_type, own) in enumerate(
        [
            ("gemma2", {**WINDOWS, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
            ("gemma3_text", WINDOWS),
            ("gpt_oss", {**WINDOWS, **EXPERTS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ]
    ):
        with subtests.test(model_type=model_type, own=own):
            folder = tmp_path / str(number)
            folder.mkdir()
            model = HuggingFaceModel(
                HuggingFaceOptions(),
                ModelContext(path=None, config={**config, "model_type": model_type, **own}, assets=folder / "assets"),
            )
            module = model.build(seed=0, dtype=torch.float32, device=torch.device("cpu"))
            rows = [
                torch.randint(0, 64, (length,), generator=torch.Generator().manual_seed(length))
                for length in (11, 6, 6)
            ]
            batch = model.pack(
                [tokens_payload(row[:1].tolist(), row[1:].tolist()) for row in rows], budget=64, multiple=5
            )[0]
            with torch.no_grad():
                ours_N = model.decide(module, batch, temperature=1.0).logprobs_N
                module.set_attn_implementation("eager")
                logits = [module(input_ids=row[None], use_cache=False).logits[0, :-1] for row in rows]
            theirs = [
                part.log_softmax(-1).gather(-1, row[1:, None])[:, 0] for part, row in zip(logits, rows, strict=True)
            ]
            torch.testing.assert_close(ours_N, torch.cat(theirs), atol=1e-5, rtol=0)


def test_a_head_of_its_own_is_noticed(tmp_path, config):
    class Wrong(HuggingFaceModel):
        def logits(self, module, hidden_ND):
            return super().logits(module, hidden_ND) * 1.01

    with pytest.raises(PluginIncompatibleError, match="logits differ"):
        build(tmp_path, {**config, "initializer_range": 0.3}, Wrong)
