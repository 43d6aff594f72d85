"""The same model in another process, whose hashes differ: what it encodes, packs and builds."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import msgspec
import torch

from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Model, ModelContext
from cosmos_core.testing.conformance.model.evaluation import ROOM, demonstrations
from cosmos_core.testing.conformance.processes import ask
from cosmos_core.types import Payload, Prompt
from cosmos_core.weights.digest import digest_of
from cosmos_core.weights.shards import canonical_tensors

_TIMEOUT_S: Final = 100.0


@attrs.frozen(kw_only=True)
class Question:
    """How to make the model, and what to ask of it; the fields of `ModelContext` are told one by one."""

    plugin: str
    options: dict[str, Any]
    path: str | None
    config: dict[str, Any] | None
    assets: str
    trust_remote_code: bool
    prompts: list[Prompt]
    seed: int


@attrs.frozen(kw_only=True)
class Description:
    """What a process makes of the rows.

    Attributes:
        encodings: A digest of each payload, of prompts first.
        packing: Sequences of each micro-batch.
        weights: Digest of the module from the seed.
    """

    encodings: list[str]
    packing: list[list[int]]
    weights: str


def describe(model: Model, prompts: Sequence[Prompt], seed: int) -> Description:
    """Encode and pack the rows, and build the module."""
    shown = demonstrations(model, prompts)
    module = model.build(seed=seed, dtype=torch.float32, device=torch.device("cpu"))
    return Description(
        encodings=[_digest(payload) for payload in [*map(model.encode, prompts), *shown]],
        packing=[list(batch.sequences) for batch in model.pack(shown, budget=ROOM)],
        weights=digest_of(canonical_tensors(module)),
    )


def describe_elsewhere(question: Question) -> Description:
    """What a new process describes."""
    return ask(
        "cosmos_core.testing.conformance.model.process",
        question,
        Description,
        timeout_s=_TIMEOUT_S,
        late=f"another process did not encode {len(question.prompts)} rows in {_TIMEOUT_S:g} s",
        failed="the model cannot be made in another process",
    )


def _digest(payload: Payload) -> str:
    state = hashlib.blake2b(payload.kind.encode(), digest_size=16)
    for name, array in sorted(payload.arrays.items()):
        state.update(f"{name} {array.dtype} {array.shape} ".encode() + bytes(array.data))
    return state.hexdigest()


def _main() -> None:
    asked, answered = map(Path, sys.argv[1:])
    question = msgspec.json.decode(asked.read_bytes(), type=Question)
    torch.set_num_threads(1)
    context = ModelContext(
        path=question.path,
        config=question.config,
        assets=Path(question.assets),
        trust_remote_code=question.trust_remote_code,
    )
    plugins = PluginSet.load([("model", question.plugin)])
    model = plugins.create("model", question.plugin, question.options, context)
    answered.write_bytes(msgspec.json.encode(describe(model, question.prompts, question.seed)))


if __name__ == "__main__":
    _main()
