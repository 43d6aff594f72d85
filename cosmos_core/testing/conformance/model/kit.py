"""The kit for models, with the tests of records, counters and mesh axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from cosmos_core.config.loading import recipe_from
from cosmos_core.config.schema import MeshConfig
from cosmos_core.policy.mesh.layout import undeclared
from cosmos_core.protocols import Decided, MicroBatch, Model, ModelCapabilities
from cosmos_core.protocols.model import AfterStep, Record, Recording
from cosmos_core.testing.conformance.model.decisions import ModelComparing, ModelDecisions
from cosmos_core.testing.conformance.model.encoding import ModelConversing, ModelEncoding, ModelShowing
from cosmos_core.testing.conformance.model.gradients import ModelGradients, ModelWeights
from cosmos_core.testing.conformance.model.latents import ModelBlending, ModelConditioning
from cosmos_core.testing.conformance.model.layouts import ModelLayouts
from cosmos_core.testing.conformance.model.noise import ModelDenoising, ModelNoising
from cosmos_core.testing.conformance.model.packing import ModelPacking, ModelPadding
from cosmos_core.testing.conformance.model.subject import ROOM, ModelBuilding, ModelSetting
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Array, Payload
from cosmos_core.weights.shards import dtype_name


class ModelRecording(ModelSetting):
    """`records` and `record` of a model that has them; engines are tested by their own kit."""

    @pytest.fixture
    def recording(self, model: Model) -> Recording:
        """The model, as one that records."""
        if not isinstance(model, Recording) or not model.records():
            pytest.skip("not declared: with these options the model records nothing (`Recording`)")
        return model

    def test_each_unit_has_a_record_of_what_is_declared(
        self, model: Model, recording: Recording, module: torch.nn.Module, payloads: Sequence[Payload]
    ) -> None:
        """An engine keeps rows by the place of a unit in the forward."""
        newest = recording.record(module)
        for batch in model.pack(payloads, budget=ROOM):
            _decide(model, module, batch)
            found = {name: (dtype_name(rows.dtype), tuple(rows.shape)) for name, rows in newest().items()}
            wanted = {record.name: (record.dtype, (batch.num_units, *record.shape)) for record in recording.records()}
            if found != wanted:
                fault(f"a forward of {batch.num_units} units recorded {found}; records() declares {wanted}")

    def test_training_on_its_own_records_changes_nothing(
        self, model: Model, recording: Recording, module: torch.nn.Module, payloads: Sequence[Payload]
    ) -> None:
        """With equal weights, what was recorded is what would have been done."""
        newest = recording.record(module)
        for payload in payloads:
            (batch,) = model.pack([payload], budget=ROOM)
            free = _decide(model, module, batch)
            recorded = _with_records(payload, [(record, newest()[record.name]) for record in recording.records()])
            (again,) = model.pack([recorded], budget=ROOM)
            apart = (_decide(model, module, again).logprobs_N - free.logprobs_N).abs()
            if apart.numel() and not apart.max() <= self.tolerance:
                fault(f"with its own records, under the same weights, log-probs differ by {apart.max():.2g}")


def _decide(model: Model, module: torch.nn.Module, batch: MicroBatch) -> Decided:
    with torch.no_grad():
        return model.decide(module, batch, temperature=1.0)


def _with_records(payload: Payload, recorded: Sequence[tuple[Record, torch.Tensor]]) -> Payload:
    """The payload as an engine would have made it."""
    arrays = {
        record.name: Array(
            dtype=record.dtype,
            shape=tuple(rows.shape),
            data=rows.cpu().contiguous().view(torch.uint8).numpy().tobytes(),
        )
        for record, rows in recorded
    }
    zeros = np.zeros(payload.arrays["completion"].shape, np.float32)
    logprobs = Array(dtype="float32", shape=zeros.shape, data=zeros.tobytes())
    return attrs.evolve(payload, arrays={**payload.arrays, **arrays, "logprobs": logprobs})


class ModelCounters(ModelSetting):
    """`counters` and `after_step` of a model that has them; their sums over processes are tested with the layouts."""

    @pytest.fixture
    def counting(self, model: Model, module: torch.nn.Module) -> AfterStep:
        """The model, as one that counts."""
        if not isinstance(model, AfterStep) or not model.counters(module):
            pytest.skip("not declared: with these options the model counts nothing (`AfterStep`)")
        return model

    def test_only_forwards_of_a_step_are_counted_from_zero(
        self, model: Model, counting: AfterStep, module: torch.nn.Module, payloads: Sequence[Payload]
    ) -> None:
        """The trainer zeroes the tensors and writes the sums over all processes into them."""
        if odd := [counter.dtype for counter in counting.counters(module) if counter.dtype != torch.float32]:
            fault(f"counters() gave {odd[0]}; give float32, in which they are summed over processes")
        seen = []
        for is_learned in (True, True, False):
            for counter in counting.counters(module):
                counter.zero_()
            _total(model, module, payloads, is_learned=is_learned)
            seen.append([counter.clone() for counter in counting.counters(module)])
        first, again, unlearned = seen
        if any(not torch.equal(one, other) for one, other in zip(first, again, strict=True)):
            fault("the same forwards count something else after counters() were zeroed; give the tensors, never copies")
        if any(bool(counter.any()) for counter in unlearned):
            fault("a forward without weights_N is counted: nothing is learned from it")

    def test_acting_on_counts_leaves_trained_parameters_alone(
        self, model: Model, counting: AfterStep, module: torch.nn.Module, payloads: Sequence[Payload]
    ) -> None:
        """The optimizer has moved them already, and keeps a state for each."""
        _total(model, module, payloads, is_learned=True).backward()  # type: ignore[no-untyped-call]
        before = {
            name: parameter.detach().clone()
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }
        metrics = counting.after_step(module)
        if odd := [name for name, value in metrics.items() if not math.isfinite(value)]:
            fault(f"after_step() reports {odd[0]} = {metrics[odd[0]]}; give finite numbers")
        after = dict(module.named_parameters())
        if moved := [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]:
            fault(f"after_step() changed {moved[0]}, which has a gradient; leave it to the optimizer")


def _total(model: Model, module: torch.nn.Module, payloads: Sequence[Payload], *, is_learned: bool) -> torch.Tensor:
    """The log-probability of all payloads, evaluated as in a step or outside of one."""
    total = torch.zeros(())
    for batch in model.pack(payloads, budget=ROOM):
        weights_N = torch.ones(sum(batch.num_decisions)) if is_learned else None
        decided = model.decide(module, attrs.evolve(batch, weights_N=weights_N), temperature=1.0)
        total = total + decided.logprobs_N.sum()
    return total


class ModelDeclarations(ModelSetting):
    """Mesh axes that are not declared; payload kinds are tested where payloads are made."""

    def test_undeclared_mesh_axes_are_refused(self, capabilities: ModelCapabilities) -> None:
        """A recipe that asks for what a model cannot do fails before it starts."""
        for axis in attrs.fields(MeshConfig):
            if axis.name in capabilities.mesh_axes:
                continue
            mesh = recipe_from(self._recipe(axis.name)).policy.mesh
            refused = "".join(undeclared(mesh, capabilities.mesh_axes))
            if f"policy.mesh.{axis.name}" in refused:
                continue
            fault(f"a recipe with policy.mesh.{axis.name} = 2 is taken, and the model does not declare that axis")

    def _recipe(self, axis: str) -> dict[str, Any]:
        return {
            "run": {"name": "conformance", "steps": 1},
            "model": {"plugin": self.plugin, "config": {"model_type": "any"}},
            "algorithm": {"plugin": "any"},
            "dataset": {"plugin": "any"},
            # `ep` spreads experts over the processes of other axes.
            "policy": {"mesh": {axis: 2} if axis != "ep" else {"dp_shard": 2, "ep": 2}},
        }


class ModelConformance(
    ModelBuilding,
    ModelEncoding,
    ModelPacking,
    ModelPadding,
    ModelDecisions,
    ModelComparing,
    ModelDenoising,
    ModelNoising,
    ModelBlending,
    ModelGradients,
    ModelWeights,
    ModelCounters,
    ModelRecording,
    ModelConditioning,
    ModelShowing,
    ModelConversing,
    ModelLayouts,
    ModelDeclarations,
):
    """Tests that every model must pass, on a tiny one of its family.

    A language model needs `plugin` and `config` (or `path`):

        class TestLlama(ModelConformance):
            plugin = "llama"
            config = TINY

    A model of another kind of payload overrides `payloads`, `reference` and `load_exported` as well.

    Attributes:
        config: A Hugging Face config, as `[model.config]` of a recipe, for random weights. Take a few layers of width
            16 to 64 and a large `initializer_range` (0.2), so that mistakes show.
        path: A folder with a small checkpoint, instead of `config`.
        tokenizer: What `prepare` is asked to make, as `[model.tokenizer]` of a recipe; None asks for nothing.
        temperatures: At which log-probs and entropies are compared with the reference. Gradients are tested at the
            first that is not 1.
        tolerance: Largest difference of a log-prob or entropy in float32: absolute, and relative to its size.

    Fixtures to override:
        options: The plugin's options, as a recipe gives them.
        context: The `ModelContext`.
        prompts: Rows, of different lengths, with demonstrations.
        corpus: Texts that the tokenizer is trained on; those of `prompts`.
        payloads: What is packed and evaluated; the demonstrations of `prompts`, noised where the model is `Noising`. At
            least two, of different lengths, and one at least of each payload kind that is declared.

    Methods to override:
        reference(model, module, payloads, *, temperature): What each payload's decisions are, by other means; one
            `Decided` a payload, its entropy None where there is none to compare. The default exports the module,
            loads it with `transformers.AutoModelForCausalLM` in float32 and runs each sequence alone.
        load_exported(directory): The tensors of an exported folder by canonical name, as the family's public library
            reads them. The default is `AutoModelForCausalLM.from_pretrained`.
    """
