"""Embeddings from tables and files."""

import pytest
import torch
from safetensors.torch import save_file

from cosmos_core.errors import DataError
from cosmos_core.models.diffusion.rows import file_embedding, table_embedding


def test_a_word_is_the_same_wherever_it_stands():
    red, both = table_embedding("red", 4, 16), table_embedding("a red", 4, 16)
    assert torch.equal(red[0], both[1])
    assert not torch.equal(both[0], both[1])
    assert table_embedding("", 4, 16).shape == (0, 16)
    # Every process and every release draws these.
    assert float(red[0, 0]) == pytest.approx(-0.48332640528678894, abs=1e-6)

    with pytest.raises(DataError, match=r"3 words, and model\.options.text_length is 2"):
        table_embedding("one two three", 2, 16)


def test_a_file_is_read(subtests, tmp_path):
    for number, tensors in enumerate(
        [{"text": torch.ones(3, 16), "other": torch.ones(1)}, {"any": torch.ones(1, 3, 16, dtype=torch.bfloat16)}]
    ):
        with subtests.test(tensors=tensors):
            folder = tmp_path / str(number)
            folder.mkdir()
            save_file(tensors, folder / "text.safetensors")
            found = file_embedding(str(folder / "text.safetensors"), 4, 16)
            assert found.dtype == torch.float32
            assert found.tolist() == torch.ones(3, 16).tolist()


def test_a_file_that_does_not_fit_is_refused(subtests, tmp_path):
    for number, (tensors, said) in enumerate(
        [
            ({"text": torch.ones(3, 8)}, r"shape \[3, 8\]; the model takes \[tokens, 16\]"),
            ({"text": torch.ones(5, 16)}, "5 tokens are more than the 4"),
            ({"a": torch.ones(3, 16), "b": torch.ones(3, 16)}, "tensors a, b; there is one"),
            ({"text": torch.full((3, 16), torch.nan)}, "not finite"),
        ]
    ):
        with subtests.test(tensors=tensors, said=said):
            folder = tmp_path / str(number)
            folder.mkdir()
            save_file(tensors, folder / "text.safetensors")
            with pytest.raises(DataError, match=said):
                file_embedding(str(folder / "text.safetensors"), 4, 16)

    (tmp_path / "text.safetensors").write_bytes(b"pickle")
    for name in ("text.safetensors", "none.safetensors"):
        with pytest.raises(DataError, match="no readable safetensors file"):
            file_embedding(str(tmp_path / name), 4, 16)
