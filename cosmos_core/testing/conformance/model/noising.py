"""Noising: the points at which a world model learns a sample, and what it learns there (`Noising`).

Shape legend: N decisions of a payload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import pytest
import torch

from cosmos_core.protocols import Denoising, Model, Noising
from cosmos_core.testing.conformance.model import latents
from cosmos_core.testing.conformance.model.evaluation import decide_each
from cosmos_core.testing.conformance.model.setting import ModelSetting
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Payload, Prompt

_SEED: Final = 7
_NUMBER: Final = 6


class ModelNoising(ModelSetting):
    """`noised`, and `decide` of regressions."""

    @pytest.fixture
    def noising(self, model: Model) -> Noising:
        """The model."""
        if not isinstance(model, Noising):
            pytest.skip("not declared: the model learns no regressions (`Noising`)")
        return model

    @pytest.fixture
    def samples(self, model: Model, prompts: Sequence[Prompt]) -> Sequence[Payload]:
        """Demonstrations before points are drawn."""
        found = [model.encode_demonstration(prompt) for prompt in prompts if prompt.demonstration is not None]
        if not found:
            pytest.skip("not given: no row of `prompts` has a demonstration")
        return found

    def test_points_are_drawn_by_the_seed_alone(
        self, noising: Noising, make: Callable[..., Any], samples: Sequence[Payload]
    ) -> None:
        """A resumed run, and each process that shares a sequence, learns the same; the next epoch learns others."""
        for payload in samples:
            first = noising.noised(payload, _SEED)
            for when, again in (
                ("a second time", noising.noised(payload, _SEED)),
                ("by another instance", make().noised(payload, _SEED)),
            ):
                if _points(first) != _points(again):
                    fault(f"noised() draws other points {when} from the same seed; draw from the seed alone")
            if _points(first) == _points(noising.noised(payload, _SEED + 1)):
                fault("noised() draws the same points from another seed, so a row is always learned at the same ones")

    def test_points_are_times_and_a_seed_of_noise(self, noising: Noising, samples: Sequence[Payload]) -> None:
        """As many as asked for; the rest of the payload stays."""
        for payload in samples:
            before = dict(payload.arrays)
            if "sample" not in before:
                fault(f"encode_demonstration() gave arrays {sorted(before)}; give the `sample` to imitate")
            default, chosen = noising.noised(payload, _SEED), noising.noised(payload, _SEED, num_decisions=_NUMBER)
            if dict(payload.arrays) != before:
                fault("noised() changed the payload that it was given; give another one")
            for made in (default, chosen):
                _check_points(made)
                if changed := [name for name, array in before.items() if made.arrays.get(name) is not array]:
                    fault(f"noised() changed {', '.join(changed)}; give what there was as it is")
            if (number := chosen.arrays["times"].shape[0]) != _NUMBER:
                fault(f"noised(num_decisions={_NUMBER}) drew {number} times")

    def test_regressions_are_errors_of_the_velocity(
        self, model: Model, noising: Noising, module: torch.nn.Module, samples: Sequence[Payload]
    ) -> None:
        """Minus the mean squared distance to e - x_0, e standard normal: seen with a velocity of zero."""
        if not isinstance(model, Denoising):
            pytest.skip("not declared: the model does not denoise (`Denoising`)")
        payload = samples[0]
        canvas = model.canvas(payload)
        state = latents.drawn(canvas, 1, 0)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
            velocity = model.velocity(module, state, torch.tensor([0.5]), [payload], guidance=model.neutral_guidance)
        if bool(velocity.any()):
            pytest.skip("without weights, the velocity of this family is not zero")
        noised = noising.noised(payload, _SEED, num_decisions=_NUMBER)
        errors = []
        for level in (0.0, 1.0, -1.0):
            sample = torch.full(canvas.shape, level)
            arrays = {**noised.arrays, "sample": latents.array(sample)}
            with torch.no_grad():
                errors.append(-decide_each(model, module, [attrs.evolve(noised, arrays=arrays)])[0].logprobs_N)
        # (e - 1)² + (e + 1)² - 2 e² is 2 at each place, whatever e.
        if not torch.allclose(errors[1] + errors[2] - 2 * errors[0], torch.full((_NUMBER,), 2.0), atol=1e-3):
            fault(
                "log-probs of regressions are not minus the mean squared distance of the velocity to e - sample: with "
                f"a velocity of 0 they are {[(-each).tolist() for each in errors]} for samples of 0, 1 and -1"
            )
        number = state[0].numel() if canvas.is_given_T is None else int(state[0][:, ~canvas.is_given_T].numel())
        spread = 8 * (2.0 / number) ** 0.5
        if not bool(((errors[0] - 1.0).abs() <= spread).all()) or len({*errors[0].tolist()}) < _NUMBER:
            fault(
                f"the mean square of the noise of {_NUMBER} decisions is {errors[0].tolist()}; draw standard normal "
                "noise, another for each"
            )


def _points(payload: Payload) -> tuple[bytes, ...]:
    return tuple(bytes(payload.arrays[name].data) for name in ("times", "noise_seed") if name in payload.arrays)


def _check_points(payload: Payload) -> None:
    found = {name: payload.arrays.get(name) for name in ("times", "noise_seed")}
    times, seed = found["times"], found["noise_seed"]
    if times is None or times.dtype != "float32" or len(times.shape) != 1 or not times.shape[0]:
        fault(f"noised() gave times {times and (times.dtype, times.shape)}; give float32, one for each decision")
    if seed is None or (seed.dtype, seed.shape) != ("int64", ()):
        fault(f"noised() gave noise_seed {seed and (seed.dtype, seed.shape)}; give int64 []")
    values_N = latents.tensor(payload, "times")
    if not bool(((values_N >= 0) & (values_N <= 1)).all()):
        fault(f"noised() drew times {values_N.tolist()}; 1 is noise and 0 is data")
