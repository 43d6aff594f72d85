"""How prompts that hold more than token ids enter a forward (`Conditioned`); engines are tested by their own kit."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest
import torch

from cosmos_core.errors import DataError
from cosmos_core.protocols import Conditioned, Conditioning, Model
from cosmos_core.testing.conformance.model.setting import ModelSetting
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Payload, Prompt


class ModelConditioning(ModelSetting):
    """`condition` and `enter` of a model that has them."""

    @pytest.fixture
    def conditioned(self, model: Model) -> Conditioned:
        """The model, as one whose prompts may show something."""
        if not isinstance(model, Conditioned):
            pytest.skip("not declared: prompts are token ids alone (`Conditioned`)")
        return model

    @pytest.fixture
    def conditioned_prompts(
        self,
        model: Model,
        conditioned: Conditioned,  # noqa: ARG002 - it skips where there is none
        prompts: Sequence[Prompt],
    ) -> Sequence[Payload]:
        """Prompts that show something."""
        shown = [model.encode(prompt) for prompt in prompts if prompt.media]
        if not shown:
            fault("the model is `Conditioned`, and none of `prompts` shows anything; give some of them media")
        return shown

    def test_text_needs_no_conditioning(
        self, model: Model, conditioned: Conditioned, prompts: Sequence[Prompt]
    ) -> None:
        """An engine computes prompts of text as it does for any model."""
        if any(conditioned.condition(model.encode(prompt)) is not None for prompt in prompts if not prompt.media):
            fault("condition() of a prompt without media gave something; give None where token ids say it all")

    def test_every_unit_of_a_prompt_has_a_position_and_features(
        self, conditioned: Conditioned, module: torch.nn.Module, conditioned_prompts: Sequence[Payload]
    ) -> None:
        """An engine cuts prompts into pieces, anywhere."""
        for payload in conditioned_prompts:
            units = payload.arrays["prompt"].shape[0]
            conditioning = self._condition(conditioned, payload)
            if conditioning.positions.shape[-1] != units or conditioning.positions.dtype != torch.int64:
                fault(f"positions of {units} units are {list(conditioning.positions.shape)}; give int64 [..., {units}]")
            with torch.no_grad():
                features = conditioned.enter(module, conditioning)
            if odd := {name: list(rows.shape) for name, rows in features.items() if len(rows) != units}:
                fault(f"enter() of {units} units gave {odd}; give a row for each unit")

    def test_what_enters_follows_the_weights(
        self, model: Model, conditioned: Conditioned, module: torch.nn.Module, conditioned_prompts: Sequence[Payload]
    ) -> None:
        """After an update an engine asks again, with what it was told of the prompt before."""
        conditioning = self._condition(conditioned, conditioned_prompts[0])
        other = model.build(seed=1, dtype=torch.float32, device=torch.device("cpu"))
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.5)  # those of a checkpoint are not drawn
            one, again, changed = (conditioned.enter(each, conditioning) for each in (module, module, other))
        if any(not torch.equal(one[name], again[name]) for name in one):
            fault("enter() gave something else for the same weights and prompt")
        if all(torch.equal(one[name], changed[name]) for name in one):
            fault("enter() gave the same for other weights; keep nothing from one call to the next")

    def test_a_prompt_that_lacks_an_array_is_refused(
        self, conditioned: Conditioned, conditioned_prompts: Sequence[Payload]
    ) -> None:
        """An engine refuses a request when it comes, not when it is computed."""
        for lost in conditioned_prompts[0].arrays.keys() - {"prompt"}:
            rest = {name: array for name, array in conditioned_prompts[0].arrays.items() if name != lost}
            try:
                conditioned.condition(attrs.evolve(conditioned_prompts[0], arrays=rest))
            except DataError:
                continue
            fault(f"condition() took a prompt that shows something without its array {lost!r}; raise DataError")

    def test_an_array_that_it_does_not_know_is_refused(
        self, model: Model, conditioned: Conditioned, prompts: Sequence[Prompt]
    ) -> None:
        """Of a prompt of text, too: nothing that a request holds is left out unsaid."""
        for prompt in prompts:
            payload = model.encode(prompt)
            odd = {**payload.arrays, "kit-made": payload.arrays["prompt"]}
            try:
                conditioned.condition(attrs.evolve(payload, arrays=odd))
            except DataError:
                continue
            fault("condition() took a prompt with an array that no model knows, 'kit-made'; raise DataError")

    @staticmethod
    def _condition(conditioned: Conditioned, payload: Payload) -> Conditioning:
        conditioning = conditioned.condition(payload)
        if conditioning is None:
            fault("condition() of a prompt that shows something gave None; it would be computed as text")
        return conditioning
