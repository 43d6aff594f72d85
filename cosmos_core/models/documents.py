"""Samples of several documents: an agent's branches, each a sequence of its own to a model.

A model packs sequences, and need not know that some belong to one sample: it is given documents, and its micro-batches
are those of samples, of which one may lie in several places (`MicroBatch.spans`).

Shape legend: P units of the first document's prompt, C units after it in all documents, K documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from cosmos_core.errors import DataError
from cosmos_core.models.tokens import array_of, decided, values
from cosmos_core.protocols import MicroBatch, Model
from cosmos_core.protocols.model import Span
from cosmos_core.types import Array, Payload
from cosmos_core.types.payload import of_document

_OF_DECISIONS = ("logprobs", "versions")


def documents_of(payload: Payload) -> list[Payload]:
    """The documents of a sample, each a payload of its own; the payload itself where it is one.

    Raises:
        DataError: What it says of its documents does not fit its units.
    """
    if "documents" not in payload.arrays:
        return [payload]
    sizes = values(payload, "documents").tolist()
    prompt, completion, flags = values(payload, "prompt"), values(payload, "completion"), decided(payload)
    if not sizes or min(sizes) < 1 or sum(sizes) != len(completion):
        raise DataError(f"`documents` {sizes} of a completion of {len(completion)} units; they are parts of it")
    units, flags = np.concatenate([prompt, completion]), np.concatenate([np.zeros(len(prompt), np.bool_), flags])
    sizes[0] += len(prompt)
    found, begin, num_decided, num_rows = [], 0, 0, 0
    for index, size in enumerate(sizes):
        own, own_flags = units[begin : begin + size], flags[begin : begin + size]
        size_of_prompt = len(prompt) if index == 0 else int(np.argmax(own_flags)) if own_flags.any() else 1
        if not size_of_prompt:
            raise DataError(f"document {index} begins with a unit that the model decided, which nothing comes before")
        arrays = {
            "prompt": array_of(own[:size_of_prompt]),
            "completion": array_of(own[size_of_prompt:]),
            "decided": array_of(own_flags[size_of_prompt:]),
        }
        number, prefix = int(own_flags.sum()), of_document(index, "")
        for name, array in payload.arrays.items():
            if name.startswith(prefix):
                arrays[name.removeprefix(prefix)] = array
            elif ":" in name:
                continue  # another document's
            elif name in _OF_DECISIONS:
                arrays[name] = _part(array, num_decided, num_decided + number)
            elif name not in (*arrays, "documents", "turns", "turn_rewards"):
                arrays[name] = _part(array, num_rows, num_rows + size - 1)
        found.append(attrs.evolve(payload, arrays=arrays))
        begin, num_decided, num_rows = begin + size, num_decided + number, num_rows + size - 1
    return found


def _part(array: Array, first: int, last: int) -> Array:
    row = array.nbytes // max(array.shape[0], 1)
    data = memoryview(array.data).cast("B")[first * row : last * row]
    return attrs.evolve(array, shape=(last - first, *array.shape[1:]), data=data)


def pack_samples(model: Model, payloads: Sequence[Payload], **limits: Any) -> list[MicroBatch]:
    """Pack samples into micro-batches (`Model.pack`), each document as a sequence; indices are those of samples."""
    parts = [documents_of(payload) for payload in payloads]
    documents = [document for each in parts for document in each]
    batches = model.pack(documents, **limits)
    if len(documents) == len(payloads):
        return batches
    owners: list[int] = []
    spans: list[Span] = []
    for index, each in enumerate(parts):
        numbers = [int(decided(document).sum()) for document in each]
        owners += [index] * len(each)
        spans += [Span(first=sum(numbers[:place]), total=sum(numbers)) for place in range(len(each))]
    return [
        attrs.evolve(
            batch,
            sequences=tuple(owners[index] for index in batch.sequences),
            spans=tuple(spans[index] for index in batch.sequences),
        )
        for batch in batches
    ]
