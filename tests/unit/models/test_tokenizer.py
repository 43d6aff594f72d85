import json
from pathlib import Path

import pytest

from cosmos_core.errors import ConfigError, DataError
from cosmos_core.models.tokenizer import build_tokenizer, load_tokenizer

RECIPES = Path(__file__).parents[4] / "recipes"
CODE = """
from transformers import PreTrainedTokenizerFast
class OddTokenizer(PreTrainedTokenizerFast):
    is_odd = True
"""


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint whose tokenizer is code of its own."""
    folder = tmp_path / "odd"
    build_tokenizer(["a b c"], {"build": "byte-bpe", "vocab_size": 270, "split_digits": True}).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    said = json.loads(path.read_text())
    said |= {"tokenizer_class": "OddTokenizer", "auto_map": {"AutoTokenizer": [None, "odd.OddTokenizer"]}}
    path.write_text(json.dumps(said))
    (folder / "odd.py").write_text(CODE)
    return folder


def test_a_tokenizer_that_is_code_is_refused_with_what_to_set(tmp_path, checkpoint):
    with pytest.raises(ConfigError, match=r"OddTokenizer.*set model\.trust_remote_code = true"):
        load_tokenizer(tmp_path / "none", str(checkpoint), trust_remote_code=False)


def test_a_tokenizer_that_is_code_is_made_where_it_is_trusted(tmp_path, checkpoint, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    assert load_tokenizer(tmp_path / "none", str(checkpoint), trust_remote_code=True).is_odd


def test_code_beside_a_tokenizer_that_transformers_has_is_left_alone(tmp_path, checkpoint):
    path = checkpoint / "tokenizer_config.json"
    path.write_text(path.read_text().replace('"OddTokenizer"', '"PreTrainedTokenizerFast"'))
    loaded = load_tokenizer(tmp_path / "none", str(checkpoint), trust_remote_code=False)
    assert not hasattr(loaded, "is_odd")


def test_a_folder_without_a_tokenizer_is_refused(subtests, tmp_path):
    for number, name in enumerate(["Qwen3-32B", "Qwen2.5-7B", "Qwen3-30B-A3B", "Meta-Llama-3-8B"]):
        with subtests.test(name=name):
            here = tmp_path / str(number)
            here.mkdir()
            folder = RECIPES / "configs" / name
            with pytest.raises(DataError, match=rf"no (usable )?tokenizer at .*{name}"):
                load_tokenizer(here / "none", str(folder), trust_remote_code=False)
