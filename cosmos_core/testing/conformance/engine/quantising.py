"""Weights in few bits: what an engine says that it holds, what it loads, and what it computes with."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import pytest
import torch

from cosmos_core.protocols import FORMATS, EngineCapabilities, Format, Model
from cosmos_core.testing.conformance.engine.pricing import Pricer
from cosmos_core.testing.conformance.engine.setting import EngineSetting, Start
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Payload
from cosmos_core.weights.digest import digest_of
from cosmos_core.weights.quantization import quantise_tensors
from cosmos_core.weights.shards import ShardMap, TensorFacts, dtype_name


@attrs.frozen(kw_only=True, eq=False)
class Quantised:
    """The weights in a format.

    Attributes:
        form: The format.
        whole: Prices with the weights that are quantised.
        rounded: Prices with what codes and scales stand for.
        matrices: Shapes of the model's matrices, by canonical name.
    """

    form: Format
    whole: Pricer
    rounded: Pricer
    matrices: Mapping[str, tuple[int, ...]]

    def published(self, weights: int) -> dict[str, torch.Tensor]:
        """What a policy replica publishes of weights."""
        return quantise_tensors(self.form, self.whole.tensors(weights), self.matrices)


class QuantisingTests(EngineSetting):
    """What becomes of matrices with each of the declared `EngineCapabilities.quantizations`."""

    @pytest.fixture(params=FORMATS)
    @staticmethod
    def quantised(
        request: pytest.FixtureRequest, capabilities: EngineCapabilities, model: Model, pricer: Pricer
    ) -> Quantised:
        """The weights in a declared format."""
        if request.param not in capabilities.quantizations:
            pytest.skip(f"not declared: quantization {request.param}")
        form = FORMATS[request.param]
        rounded = Pricer(model, seed=1, form=form)
        return Quantised(form=form, whole=pricer, rounded=rounded, matrices=model.facts().matrices)

    def test_the_layout_names_codes_and_scales(self, start: Start, quantised: Quantised) -> None:
        """What the layout names is what is sent: a matrix in full would be sent in vain, and not be attested."""
        form = quantised.form.name
        expected = {
            name: TensorFacts(shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype))
            for name, tensor in quantised.published(0).items()
        }
        found = ShardMap.of_layout(start(quantization=form).layout()).tensors
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                fault(
                    f"with quantization {form}, the layout gives {name!r} as {found.get(name)}; it is published as "
                    f"{expected.get(name)}: see `Format.tensors` and `ModelFacts.matrices`"
                )

    def test_quantised_weights_are_loaded_attested_and_computed_with(
        self, start: Start, quantised: Quantised, prompts: list[Payload], capabilities: EngineCapabilities
    ) -> None:
        """The trainer can only correct for what it knows: products are those of what codes and scales stand for."""
        engine = start(quantization=quantised.form.name)
        requests = [self.request(index, prompts[index], num_samples=2) for index in range(3)]
        for results in engine.generate(requests):
            for generated in results:
                self.check_logprobs(quantised.rounded, generated, capabilities)
        tensors = quantised.published(1)
        digest = engine.load(1, tensors)
        if digest != digest_of(tensors):
            fault(
                f"with quantization {quantised.form.name}, commit_update() gave the digest {digest!r}, not that of "
                f"the codes, scales and other tensors that were written, {digest_of(tensors)!r}"
            )
        for results in engine.generate(requests):
            for generated in results:
                self.check_logprobs(quantised.rounded, generated, capabilities, weights=1)
