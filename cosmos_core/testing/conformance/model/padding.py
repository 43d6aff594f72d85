"""Padding: micro-batches have the sizes that a layout needs, and what fills them up changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest
import torch

from cosmos_core.protocols import MicroBatch, Model, ModelCapabilities
from cosmos_core.testing.conformance.model.evaluation import pack_alone, split
from cosmos_core.testing.conformance.model.setting import ModelSetting
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Payload

_MULTIPLE: Final = 7
"""One that no size of a test happens to be a multiple of."""


class ModelPadding(ModelSetting):
    """What `pack(multiple=, is_uniform=)` promises a model with `cp`, `tp` or `pp`."""

    @pytest.fixture
    def padded(
        self, model: Model, payloads: Sequence[Payload], capabilities: ModelCapabilities
    ) -> Sequence[Sequence[MicroBatch]]:
        """Micro-batches as each declared axis wants them, of two payloads or more and of one."""
        if not capabilities.mesh_axes & {"cp", "tp", "pp"}:
            pytest.skip("not declared: none of cp, tp and pp, for which micro-batches are padded")
        if {payload.kind for payload in payloads} == {"latents"}:
            pytest.skip("denoising steps are units that no axis splits")
        sizes = [pack_alone(model, payload).num_units for payload in payloads]
        uniform = (False, True) if "pp" in capabilities.mesh_axes else (False,)
        return [
            model.pack(payloads, budget=budget, multiple=_MULTIPLE, is_uniform=is_uniform)
            for budget in (max(sizes), max(sizes) + min(sizes))
            for is_uniform in uniform
        ]

    def test_padded_micro_batches_have_the_sizes_asked_for(
        self, capabilities: ModelCapabilities, padded: Sequence[Sequence[MicroBatch]]
    ) -> None:
        """Processes of `cp` and `tp` split the units evenly, and stages of a pipeline pass on one shape."""
        for batches in padded:
            if odd := [batch.num_units for batch in batches if batch.num_units % _MULTIPLE]:
                fault(f"pack(multiple={_MULTIPLE}) made micro-batches of {odd} units; pad each to a multiple")
        if "pp" not in capabilities.mesh_axes:
            return
        for batches in padded[1::2]:
            if len(sizes := {batch.num_units for batch in batches}) > 1:
                fault(f"pack(is_uniform=True) made micro-batches of {sorted(sizes)} units; pad all to one size")

    def test_padding_decides_nothing(
        self,
        model: Model,
        module: torch.nn.Module,
        payloads: Sequence[Payload],
        padded: Sequence[Sequence[MicroBatch]],
    ) -> None:
        """A decision that nobody took would be learned, and what is seen of padding would change every other."""
        alone = [pack_alone(model, payload) for payload in payloads]
        with torch.no_grad():
            expected = [model.decide(module, batch, temperature=1.0).logprobs_N for batch in alone]
        for batch in (batch for batches in padded for batch in batches):
            counts = tuple(alone[index].num_decisions[0] for index in batch.sequences)
            if batch.num_decisions != counts:
                fault(
                    f"payloads {batch.sequences} have {counts} decisions, and num_decisions says "
                    f"{batch.num_decisions} where the micro-batch is padded"
                )
            with torch.no_grad():
                found = split(batch, model.decide(module, batch, temperature=1.0))
            for index, decided in found.items():
                if not decided.logprobs_N.numel():
                    continue
                error = float((decided.logprobs_N - expected[index]).abs().max())
                if not error <= self.tolerance * (1 + float(expected[index].abs().max())):
                    fault(
                        f"the log-probs of payload {index} change by {error:.3g} where its micro-batch is padded to "
                        f"{batch.num_units} units; let no sequence see padding"
                    )
