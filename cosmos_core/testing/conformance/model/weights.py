"""Weights: what is published is the whole model, each parameter once, and what is exported is what was trained."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
import torch

from cosmos_core.protocols import Model
from cosmos_core.testing.conformance.model.evaluation import copied, decide_each, disturb, first_difference
from cosmos_core.testing.conformance.model.setting import CPU, SEED, ModelSetting, Reload
from cosmos_core.testing.conformance.model.training import imitate
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Payload, Prompt
from cosmos_core.weights.shards import ShardMap, canonical_tensors
from cosmos_core.weights.slices import size

_CODE: Final = frozenset({".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"})
"""File names that say pickle: reading one may run what it holds."""


class ModelWeights(ModelSetting):
    """The tensors of the module: those that travel, and those on disk."""

    @pytest.fixture
    def exported(self, model: Model, module: torch.nn.Module, tmp_path: Path) -> Path:
        """A folder with the exported module, whose weights are no longer those that `build` makes."""
        disturb(module)
        folder = tmp_path / "exported"
        model.export(module, folder)
        return folder

    @pytest.fixture
    def again(self, exported: Path, reload: Reload) -> Model:
        """The model of the exported folder."""
        return reload(exported)

    def test_the_shard_map_covers_each_parameter_exactly_once(self, module: torch.nn.Module) -> None:
        """Rollout replicas get what the map names; the optimizer would step twice on memory that has two names."""
        tensors = canonical_tensors(module)
        shards = ShardMap.of_tensors(tensors)
        sent = sum(size(piece) for pieces in shards.ranks.values() for piece in pieces)
        held = sum(tensor.numel() for tensor in tensors.values())
        assert sent == held
        spans = sorted((*_span(tensor), name) for name, tensor in tensors.items() if tensor.numel())
        for (_, end, name), (start, _, other) in itertools.pairwise(spans):
            if start < end:
                fault(
                    f"{name} and {other} share memory, so the shard map covers it twice; tie parameters by assigning "
                    "one Parameter object to both places, never a view of it"
                )

    def test_the_published_tensors_are_the_whole_model(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload]
    ) -> None:
        """A rollout replica that loads them must say what the trainer says."""
        disturb(module)
        replica = model.build(seed=SEED + 1, dtype=torch.float32, device=CPU)
        places, sent = canonical_tensors(replica), canonical_tensors(module)
        if places.keys() != sent.keys():
            fault(f"two modules of one model have other tensors: {', '.join(sorted(places.keys() ^ sent.keys())[:5])}")
        for name, tensor in sent.items():
            places[name].copy_(tensor)
        if not _says_the_same(model, module, replica, payloads):
            fault(
                "a module that was given every published tensor gives other log-probs: weights lie outside its "
                "parameters and persistent buffers; register them with register_parameter or register_buffer"
            )

    def test_a_training_step_changes_every_published_parameter(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload]
    ) -> None:
        """Imitating the payloads through the trainer makes them likelier, and reaches all that is published."""
        before = copied(module)
        trainable = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        losses = imitate(model, module, payloads, steps=4)
        after = canonical_tensors(module)
        still = [name for name, tensor in after.items() if name in trainable and torch.equal(tensor, before[name])]
        if still:
            fault(f"training left {len(still)} trainable parameters as they were: {', '.join(still[:5])}")
        if not losses[-1] < losses[0]:
            fault(f"imitating the payloads did not make them likelier: losses of the steps were {losses}")

    def test_the_export_holds_every_tensor(self, module: torch.nn.Module, exported: Path) -> None:
        """Someone else's library reads the folder, and must find what was trained, bit for bit."""
        found = self.load_exported(exported)
        for name, tensor in canonical_tensors(module).items():
            if name not in found:
                fault(
                    f"the exported folder has no tensor {name}, as its public library reads it; the canonical names "
                    "are those of the public format"
                )
            if not torch.equal(found[name], tensor):
                fault(
                    f"the exported {name} is not that of the module that export() was given, which was changed since "
                    "build() as training does; write each tensor of that module as it is"
                )

    def test_the_export_holds_no_pickle(self, exported: Path) -> None:
        """Reading weights must never run code."""
        unsafe = sorted(path.name for path in exported.rglob("*") if path.suffix in _CODE)
        if unsafe:
            fault(f"export() wrote {', '.join(unsafe)}, which may hold pickles; write safetensors")

    def test_the_exported_model_is_the_same_model(
        self, model: Model, module: torch.nn.Module, again: Model, payloads: Sequence[Payload]
    ) -> None:
        """A run goes on from an export as from any checkpoint."""
        rebuilt = again.build(seed=SEED + 1, dtype=torch.float32, device=CPU)
        if name := first_difference(copied(module), copied(rebuilt)):
            fault(f"a model from the exported folder has other weights: {name}")
        if not _says_the_same(model, module, rebuilt, payloads, again):
            fault("a model from the exported folder gives other log-probs, though its weights are the same")

    def test_the_exported_model_encodes_the_same(self, model: Model, again: Model, prompts: Sequence[Prompt]) -> None:
        """The tokenizer, and whatever else planning asks, travels with the weights."""
        for prompt in prompts:
            if _bytes(again.encode(prompt)) != _bytes(model.encode(prompt)):
                fault(f"a model from the exported folder encodes {prompt.text!r} differently; export the tokenizer too")
        if again.facts() != model.facts():
            fault(f"a model from the exported folder has other facts: {again.facts()}, not {model.facts()}")


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last address of a tensor, the last excluded."""
    length = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + length * tensor.element_size()


def _says_the_same(
    model: Model, module: torch.nn.Module, other: torch.nn.Module, payloads: Sequence[Payload], by: Model | None = None
) -> bool:
    """Whether two modules give the same log-probs, bit for bit."""
    with torch.no_grad():
        mine, theirs = decide_each(model, module, payloads), decide_each(by or model, other, payloads)
    return all(torch.equal(a.logprobs_N, b.logprobs_N) for a, b in zip(mine, theirs, strict=True))


def _bytes(payload: Payload) -> tuple[object, ...]:
    return payload.kind, {name: (array.shape, bytes(array.data)) for name, array in payload.arrays.items()}
