"""Embeddings of captions: from a file, from the checkpoint's own encoder, or from a table for tiny models.

Shape legend: L tokens, E width of an embedding.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from cosmos_core.errors import DataError
from cosmos_core.models.diffusion.noising import generator_of

METADATA: str = "text_embedding"
"""The key of a row's metadata that names a file with its embedding."""


def table_embedding(words: str, length: int, width: int) -> torch.Tensor:
    """float32 [L, E]: each word is a standard normal vector drawn from a hash of it; an empty text has no words.

    Raises:
        DataError: There are more words than the length.
    """
    found = words.split()
    if len(found) > length:
        raise DataError(
            f"a prompt of {len(found)} words, and model.options.text_length is {length}; raise it or shorten the prompt"
        )
    rows = [torch.randn(width, generator=generator_of(_number(word), 0)) for word in found]
    return torch.stack(rows) if rows else torch.zeros(0, width)


def file_embedding(location: str, length: int, width: int) -> torch.Tensor:
    """float32 [L, E] from the only tensor of a safetensors file, or the one called `text`.

    Raises:
        DataError: The file cannot be read, or holds nothing of this width and at most this length.
    """
    try:
        tensors = load_file(Path(location))
    except (OSError, SafetensorError) as error:
        raise DataError(f"text embedding {location!r}: no readable safetensors file: {error}") from error
    found = tensors.get("text", next(iter(tensors.values())) if len(tensors) == 1 else None)
    if found is None:
        raise DataError(
            f"text embedding {location!r}: tensors {', '.join(tensors) or 'none'}; there is one, or one called 'text'"
        )
    if found.ndim == 3 and len(found) == 1:
        found = found[0]
    if found.ndim != 2 or found.shape[1] != width:
        raise DataError(f"text embedding {location!r}: shape {list(found.shape)}; the model takes [tokens, {width}]")
    if len(found) > length:
        raise DataError(
            f"text embedding {location!r}: {len(found)} tokens are more than the {length} of model.options.text_length"
        )
    if not bool(torch.isfinite(found).all()):
        raise DataError(f"text embedding {location!r}: some values are not finite")
    return found.float()


def _number(word: str) -> int:
    return int.from_bytes(hashlib.sha256(word.encode()).digest()[:7], "big")
