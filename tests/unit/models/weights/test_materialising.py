import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cosmos_core.errors import PluginIncompatibleError
from cosmos_core.models.facts import make_shell
from cosmos_core.models.weights.materialising import materialise

torch.set_num_threads(1)

CPU = torch.device("cpu")


def shell():
    config = AutoConfig.for_model(
        "qwen3", vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, tie_word_embeddings=True
    )
    return make_shell(config, AutoModelForCausalLM, trust_remote_code=False)


def test_a_tied_parameter_stays_one():
    module = shell()
    materialise([module], device=CPU)
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def test_a_buffer_that_only_a_constructor_computes_is_refused():
    module = shell()
    module.model.norm.register_buffer("scale", torch.ones(2, device="meta"), persistent=False)
    with pytest.raises(PluginIncompatibleError, match=r"the buffer model\.norm\.scale is in no checkpoint"):
        materialise([module], device=CPU)
