"""What prompts show, for engines with a tower of their own (`Showing`)."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest

from cosmos_core.errors import DataError
from cosmos_core.protocols import Model, Showing
from cosmos_core.testing.conformance.model.setting import ModelSetting
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Prompt


class ModelShowing(ModelSetting):
    """`shown` of a model that has it."""

    @pytest.fixture
    def showing(self, model: Model) -> Showing:
        """The model, as one whose images other implementations of its family take."""
        if not isinstance(model, Showing):
            pytest.skip("not declared: no other implementation takes what its prompts show (`Showing`)")
        return model

    def test_each_image_or_video_is_shown_once_and_where_it_stands(
        self, model: Model, showing: Showing, prompts: Sequence[Prompt]
    ) -> None:
        """In the order of the prompt, no unit for two of them."""
        for prompt in prompts:
            payload = model.encode(prompt)
            shown, units = showing.shown(payload), payload.arrays["prompt"].shape[0]
            if len(shown) != len(prompt.media):
                fault(f"shown() of a prompt with {len(prompt.media)} media gave {len(shown)}; give one for each")
            end = 0
            for each in shown:
                if not 0 <= each.start < each.start + len(each.is_seen_U) <= units:
                    fault(
                        f"shown() puts {len(each.is_seen_U)} units at {each.start} of a prompt of {units}; "
                        "they lie in it"
                    )
                if not each.is_seen_U.any() or not each.is_seen_U[-1]:
                    fault("shown() gave units of which none, or not the last, is seen; end with one that is")
                if each.start < end:
                    fault(f"shown() puts one at {each.start}, before the end of another at {end}; they share no unit")
                end = each.start + len(each.is_seen_U)

    def test_what_is_shown_lacks_no_array(self, model: Model, showing: Showing, prompts: Sequence[Prompt]) -> None:
        """An engine refuses a request when it comes, not when it is computed."""
        payload = next((model.encode(prompt) for prompt in prompts if prompt.media), None)
        if payload is None:
            fault("the model is `Showing`, and none of `prompts` shows anything; give some of them media")
        for lost in payload.arrays.keys() - {"prompt"}:
            rest = {name: array for name, array in payload.arrays.items() if name != lost}
            try:
                showing.shown(attrs.evolve(payload, arrays=rest))
            except DataError:
                continue
            fault(f"shown() took a prompt that shows something without its array {lost!r}; raise DataError")
