"""The weights of given experts are those that transformers' own routers give them."""

import itertools

import pytest
import torch
from transformers import DeepseekV3Config, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from cosmos_model_moe.gating import SIGMOID, SOFTMAX


def qwen(norm):
    config = Qwen3MoeConfig(hidden_size=8, num_experts=6, num_experts_per_tok=3, norm_topk_prob=norm)
    return Qwen3MoeTopKRouter(config)


def deepseek(norm):
    config = DeepseekV3Config(
        hidden_size=8, n_routed_experts=6, num_experts_per_tok=3, n_group=2, topk_group=1, norm_topk_prob=norm
    )
    return DeepseekV3TopkRouter(config)


def test_weights_of_a_routers_own_choice_are_its_own(subtests):
    for norm, (make, gating) in itertools.product([True, False], [(qwen, SOFTMAX), (deepseek, SIGMOID)]):
        with subtests.test(norm=norm, gating=gating):
            router = make(norm)
            with torch.no_grad():
                router.weight.normal_(generator=torch.Generator().manual_seed(0))
                if gating is SIGMOID:
                    router.e_score_correction_bias.normal_(generator=torch.Generator().manual_seed(1))
                logits_UE, weights_UK, experts_UK = router(
                    torch.randn(9, 8, generator=torch.Generator().manual_seed(2))
                )
                assert torch.equal(gating.weights(router, logits_UE, experts_UK), weights_UK)
                probabilities_UE = gating.probabilities(logits_UE)
            assert probabilities_UE.sum(-1).tolist() == pytest.approx([1.0] * 9)
            assert torch.equal(probabilities_UE.argmax(-1), logits_UE.argmax(-1))
