"""Every architecture of the sweep builds, and its logits are those of transformers, on one process.

A small model of each can be tried, which is how a model that is spread over processes is checked.
"""

import logging

import pytest
import torch

from cosmos_core.models import HuggingFaceModel, HuggingFaceOptions
from cosmos_core.models.small import verify_tiny
from cosmos_core.protocols import ModelContext
from tests.nightly.layouts.architectures import ARCHITECTURES, BASE, keys_of

pytestmark = pytest.mark.sweep
LENGTHS = (21, 9, 9, 3)


def test_there_are_forty_five_architectures():
    assert len({keys_of(name)["model_type"] for name in ARCHITECTURES}) >= 45


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_those_of_transformers(tmp_path, name):
    # Not as large as the sweep of gradients has them: diffllama normalises a difference of two attentions, so that with
    # 0.4 rounding to float32 alone takes transformers' own logits 3e-5 away from those in float64.
    config = keys_of(name, initializer_range=BASE["initializer_range"])
    model = HuggingFaceModel(HuggingFaceOptions(), ModelContext(path=None, config=config, assets=tmp_path))
    module = model.build(seed=1, dtype=torch.float32, device=torch.device("cpu"))
    tokens_U = torch.randint(3, 128, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        parts = tokens_U.split(LENGTHS)
        if model.alone_because:
            ours_UV = torch.cat([model._packed_logits(module, part, [len(part)]) for part in parts])
        else:
            ours_UV = model._packed_logits(module, tokens_U, LENGTHS)
            # Eager attention is the one that computes soft caps and sinks.
            module.set_attn_implementation("eager")
        theirs_UV = torch.cat([module(input_ids=part[None]).logits[0] for part in parts])
    assert theirs_UV.std() > 0.1
    torch.testing.assert_close(ours_UV, theirs_UV, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_small_model_of_a_wide_one_is_like_it(tmp_path, name, caplog):
    wide = {"hidden_size": 512, "num_attention_heads": 64, "intermediate_size": 1024, "num_hidden_layers": 4}
    shared = {} if "num_key_value_heads" not in keys_of(name) else {"num_key_value_heads": 64}
    wide = {key: value for key, value in {**wide, **shared}.items() if key in keys_of(name)}
    model = HuggingFaceModel(
        HuggingFaceOptions(), ModelContext(path=None, config=keys_of(name, **wide), assets=tmp_path)
    )
    tried = []

    def verify(module):
        tried.append(module.num_parameters())
        model.verify(module)

    with caplog.at_level(logging.WARNING, logger="cosmos_core"):
        verify_tiny(model._blueprint(seed=0, dtype=torch.float32, device=torch.device("cpu")), verify)
    assert not [record for record in caplog.records if record.name.startswith("cosmos_core")]
    assert len(tried) == 1
