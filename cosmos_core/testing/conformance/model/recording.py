"""What a model's forwards record for training (`Recording`)."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import pytest
import torch

from cosmos_core.protocols import Decided, MicroBatch, Model, Record, Recording
from cosmos_core.testing.conformance.model.evaluation import ROOM
from cosmos_core.testing.conformance.model.setting import ModelSetting
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
