import pytest
import tokenizers
import torch
import transformers

torch.set_num_threads(1)

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<end>"


def make(folder, *, template=None, num_labels=1, pad="<pad>", head=True):
    """A tiny random Llama classifier over bytes."""
    torch.manual_seed(0)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {each: number for number, each in enumerate([*alphabet, "<end>", "<pad>"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token=pad)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        num_labels=num_labels,
        bos_token_id=None,
        eos_token_id=None,
    )
    kind = transformers.LlamaForSequenceClassification if head else transformers.LlamaForCausalLM
    kind(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return make(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="session")
def chatty(tmp_path_factory):
    return make(tmp_path_factory.mktemp("chatty"), template=TEMPLATE, num_labels=3)


@pytest.fixture
def make_checkpoint(tmp_path):
    return lambda **fields: make(tmp_path, **fields)
