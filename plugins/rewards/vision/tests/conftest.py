import sys

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from cosmos_core.testing.conformance.reward import shown_as
from cosmos_model_wan import tiny

torch.set_num_threads(1)


def video(*colours, height=6, width=5):
    """A video of one colour a frame."""
    return np.array([np.full((height, width, 3), each, np.uint8) for each in colours])


def completion(frames, **prompt):
    import attrs

    made = shown_as(np.asarray(frames, np.uint8))
    return attrs.evolve(made, prompt=attrs.evolve(made.prompt, **prompt))


@pytest.fixture(scope="session")
def kit():
    """What this file defines, for tests: it is not importable by name."""
    return sys.modules[__name__]


@pytest.fixture(scope="session")
def wan_pipeline():
    """A tiny random Wan, whose autoencoder has 4 channels."""
    return tiny.pipeline()


@pytest.fixture(scope="session")
def wan(wan_pipeline, tmp_path_factory):
    """The folder of its checkpoint."""
    folder = tmp_path_factory.mktemp("wan")
    wan_pipeline.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def clip(tmp_path_factory):
    """A tiny random CLIP over bytes."""
    folder = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {each: number for number, each in enumerate([*alphabet, "<end>", "<pad>"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <end>", special_tokens=[("<end>", vocabulary["<end>"])]
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>").save_pretrained(
        folder
    )
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": len(vocabulary), "max_position_embeddings": 64, "eos_token_id": vocabulary["<end>"]}
    config = transformers.CLIPConfig(
        text_config={**shape, **text, "bos_token_id": None, "pad_token_id": vocabulary["<pad>"]},
        vision_config={**shape, "image_size": 12, "patch_size": 4},
        projection_dim=8,
    )
    transformers.CLIPModel(config).save_pretrained(folder)
    return folder
