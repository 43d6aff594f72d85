"""Denoising: what engines ask of a world model, and that it trains on what they ask (`Denoising`).

Shape legend: B latents of a batch, N decisions of a payload, C channels, T latent frames, H and W latent height and
width, F frames of a video.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import attrs
import pytest
import torch

from cosmos_core.protocols import Model
from cosmos_core.protocols.world import Denoising, LatentSpec, Noising
from cosmos_core.testing.conformance.model import latents
from cosmos_core.testing.conformance.model.subject import ROOM, ModelSetting, decide_each
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Payload, Prompt

_TIMES: Final = (0.0, 0.31, 1.0)
_ERROR: Final = 1e-4
"""Largest difference of a velocity or log-prob in float32, absolute and relative."""
_BESIDE: Final = 2.0
"""A guidance beside the neutral one, by so much."""


class ModelDenoising(ModelSetting):
    """`latent_spec`, `velocity` and `render`, and `decide` of transitions."""

    @pytest.fixture
    def denoising(self, model: Model) -> Denoising:
        """The model, as an engine sees it."""
        if not isinstance(model, Denoising):
            pytest.skip("not declared: the model does not denoise (`Denoising`)")
        return model

    @pytest.fixture
    def conditions(self, model: Model, prompts: Sequence[Prompt]) -> Sequence[Payload]:
        """The rows, encoded."""
        return [model.encode(prompt) for prompt in prompts]

    @pytest.fixture
    def latent_specs(self, denoising: Denoising, conditions: Sequence[Payload]) -> Sequence[tuple[Payload, LatentSpec]]:
        """The encoded rows, each with what it asks for."""
        return [(payload, denoising.latent_spec(payload)) for payload in conditions]

    def test_a_latent_spec_says_what_is_denoised(
        self, denoising: Denoising, make: Callable[..., Any], latent_specs: Sequence[tuple[Payload, LatentSpec]]
    ) -> None:
        """An engine draws noise of this shape, and keeps what is given."""
        for payload, latent_spec in latent_specs:
            _check_latent_spec(latent_spec)
            for when, again in (("a second time", denoising), ("by another instance", make())):
                if not _same(latent_spec, again.latent_spec(payload)):
                    fault(f"latent_spec() says something else {when}; go by the payload and the options alone")

    def test_velocities_have_the_shape_of_latents(
        self, denoising: Denoising, module: torch.nn.Module, latent_specs: Sequence[tuple[Payload, LatentSpec]]
    ) -> None:
        """At each time from data to noise, and the same bits again."""
        for payload, latent_spec in latent_specs:
            for time in _TIMES:
                first, second = (_velocity(denoising, module, payload, latent_spec, time) for _ in range(2))
                if first.shape != (1, *latent_spec.shape) or first.dtype != torch.float32:
                    fault(
                        f"velocity() gave {first.dtype} {tuple(first.shape)} for latents {(1, *latent_spec.shape)}; "
                        "give float32 of their shape"
                    )
                if not bool(first.isfinite().all()):
                    fault(f"velocity() at time {time:g} is not finite; times are in [0, 1], both ends included")
                if not torch.equal(first, second):
                    fault("velocity() gives other numbers the second time; draw nothing, and leave no dropout on")

    def test_texts_condition_what_is_denoised(
        self,
        model: Model,
        denoising: Denoising,
        module: torch.nn.Module,
        prompts: Sequence[Prompt],
        latent_specs: Sequence[tuple[Payload, LatentSpec]],
    ) -> None:
        """A row with the text of another one asks for something else."""
        # Metadata may say more than the text: an embedding of it, for one.
        rows = [(prompt, *each) for prompt, each in zip(prompts, latent_specs, strict=True) if not prompt.metadata]
        texts = {prompt.text for prompt, *_ in rows if isinstance(prompt.text, str)}
        if len(texts) == 1 or not rows:
            pytest.skip("not given: two rows of other texts, without metadata")
        for prompt, payload, latent_spec in rows:
            expected = _velocity(denoising, module, payload, latent_spec, 0.5)
            for text in sorted(texts - {prompt.text}):
                other = model.encode(attrs.evolve(prompt, text=text))
                if not torch.equal(_velocity(denoising, module, other, latent_spec, 0.5), expected):
                    return
        fault(
            "velocity() is the same for a row whatever its text says; encode() and the forward go by the text (if the "
            "model takes none, give `prompts` one text)"
        )

    def test_frames_that_are_given_do_not_move(
        self, denoising: Denoising, module: torch.nn.Module, latent_specs: Sequence[tuple[Payload, LatentSpec]]
    ) -> None:
        """They condition what is denoised, and are no part of it."""
        given = [(payload, latent_spec) for payload, latent_spec in latent_specs if latent_spec.is_given_T is not None]
        if not given:
            pytest.skip("not given: no row of `prompts` gives frames")
        for payload, latent_spec in given:
            velocity = _velocity(denoising, module, payload, latent_spec, 0.5)
            assert latent_spec.is_given_T is not None
            if bool(velocity[:, :, latent_spec.is_given_T].any()):
                fault("velocity() moves frames that are given; give zero there")
            if not bool(velocity[:, :, ~latent_spec.is_given_T].any()):
                fault("velocity() is zero in frames that are not given, where one is")

    def test_velocities_do_not_depend_on_the_batch(
        self, denoising: Denoising, module: torch.nn.Module, latent_specs: Sequence[tuple[Payload, LatentSpec]]
    ) -> None:
        """An engine batches what it has; a trainer packs otherwise."""
        shape = latent_specs[0][1].shape
        alike = [(payload, latent_spec) for payload, latent_spec in latent_specs if latent_spec.shape == shape]
        states = torch.cat([latents.drawn(latent_spec, 1, index) for index, (_, latent_spec) in enumerate(alike)])
        times = torch.linspace(0.1, 0.9, len(alike))
        guidance = denoising.neutral_guidance + _BESIDE
        with torch.no_grad():
            together = denoising.velocity(module, states, times, [each for each, _ in alike], guidance=guidance)
            for index, (payload, _) in enumerate(alike):
                alone = denoising.velocity(
                    module, states[index : index + 1], times[index : index + 1], [payload], guidance=guidance
                )
                if not torch.allclose(alone[0], together[index], rtol=_ERROR, atol=_ERROR):
                    error = float((alone[0] - together[index]).abs().max())
                    fault(f"velocity() of row {index} changes by {error:.3g} with what else is in the batch")

    def test_guidance_begins_at_the_neutral_one(
        self, denoising: Denoising, module: torch.nn.Module, latent_specs: Sequence[tuple[Payload, LatentSpec]]
    ) -> None:
        """Guided velocities lie on a line, on which the neutral guidance is the prompt's own, in fewer forwards."""
        payload, latent_spec = latent_specs[0]
        work = []
        found = []
        for beside in (0.0, 1.0, 2.0):
            guidance = denoising.neutral_guidance + beside
            with _counted(module) as counts:
                found.append(_velocity(denoising, module, payload, latent_spec, 0.6, guidance=guidance))
            work.append(counts[0])
        if not torch.allclose(found[2] - found[1], found[1] - found[0], rtol=1e-3, atol=1e-3):
            fault(
                f"velocities at guidance {denoising.neutral_guidance:g} and 1 and 2 above it do not lie on a line; "
                "guidance is a blend of the velocity of the prompt and of one without"
            )
        if torch.allclose(found[1], found[0], rtol=_ERROR, atol=_ERROR):
            fault("velocity() does not change with the guidance")
        if not work[0] < work[1]:
            fault(
                f"at the neutral guidance of {denoising.neutral_guidance:g} as much is computed as at another; one "
                "forward is enough there"
            )

    def test_transitions_are_normal_round_what_the_velocity_says(
        self,
        model: Model,
        denoising: Denoising,
        module: torch.nn.Module,
        latent_specs: Sequence[tuple[Payload, LatentSpec]],
    ) -> None:
        """The log-prob is the density's mean over what is decided, whichever sampler made it, guided or not."""
        for beside in (0.0, _BESIDE):
            guidance = denoising.neutral_guidance + beside
            made = [
                latents.walked(payload, latent_spec, number=2 + index % 2, guidance=guidance, seed=10 * index)
                for index, (payload, latent_spec) in enumerate(latent_specs)
            ]
            with torch.no_grad():
                found = decide_each(model, module, made, budget=ROOM)
                for index, (payload, (prompt, latent_spec)) in enumerate(zip(made, latent_specs, strict=True)):
                    expected_N = _densities(denoising, module, payload, prompt, latent_spec)
                    found_N = found[index].logprobs_N
                    if not torch.allclose(found_N, expected_N, rtol=_ERROR, atol=_ERROR):
                        fault(
                            f"log-probs of transitions of row {index} at guidance {guidance:g} are {found_N.tolist()}; "
                            f"by velocity() they are {expected_N.tolist()}: the mean over what is decided of the "
                            "normal log-density round a x_t + b v + offset"
                        )

    def test_latents_can_be_looked_at(
        self, denoising: Denoising, latent_specs: Sequence[tuple[Payload, LatentSpec]]
    ) -> None:
        """Rewards and reports see frames."""
        for payload, latent_spec in latent_specs[:2]:
            state = latents.drawn(latent_spec, 1, 0)[0]
            shown = denoising.render(state, payload)
            if shown.kind != "media" or not {"frames", "fps"} <= shown.arrays.keys():
                fault(
                    f"render() gave a payload of kind {shown.kind!r} with {sorted(shown.arrays)}; give frames and fps"
                )
            frames, fps = shown.arrays["frames"], shown.arrays["fps"]
            if frames.dtype != "uint8" or len(frames.shape) != 4 or frames.shape[0] < 1 or frames.shape[3] != 3:
                fault(f"render() gave frames {frames.dtype} {frames.shape}; give uint8 [frames, height, width, 3]")
            if (fps.dtype, fps.shape) != ("float32", ()) or not float(latents.tensor(shown, "fps")) > 0:
                fault(f"render() gave fps {fps.dtype} {fps.shape}; give a positive float32 []")
            again = denoising.render(state, payload)
            other = denoising.render(-state, payload)
            if bytes(again.arrays["frames"].data) != bytes(frames.data):
                fault("render() gives other frames of the same latents; draw nothing")
            if bytes(other.arrays["frames"].data) == bytes(frames.data):
                fault("render() gives the same frames of other latents")


def _check_latent_spec(latent_spec: LatentSpec) -> None:
    if len(latent_spec.shape) != 4 or not all(isinstance(size, int) and size > 0 for size in latent_spec.shape):
        fault(f"latent_spec() has shape {latent_spec.shape}; give (channels, frames, height, width)")
    given, is_given_T = latent_spec.given, latent_spec.is_given_T
    if (given is None) != (is_given_T is None):
        fault("latent_spec() has only one of given and is_given_T; give both, or neither")
    if given is None or is_given_T is None:
        return
    if given.shape != latent_spec.shape or given.dtype != torch.float32:
        fault(f"latent_spec().given is {given.dtype} {tuple(given.shape)}; give float32 {latent_spec.shape}")
    if is_given_T.shape != latent_spec.shape[1:2] or is_given_T.dtype != torch.bool:
        fault(
            f"latent_spec().is_given_T is {is_given_T.dtype} {tuple(is_given_T.shape)}; "
            f"give bool [{latent_spec.shape[1]}]"
        )
    if bool(is_given_T.all()):
        fault("latent_spec() gives every frame, so nothing is left to denoise")


def _same(first: LatentSpec, second: LatentSpec) -> bool:
    return first.shape == second.shape and all(
        torch.equal(one, other) if one is not None and other is not None else one is other
        for one, other in ((first.given, second.given), (first.is_given_T, second.is_given_T))
    )


def _velocity(
    denoising: Denoising,
    module: torch.nn.Module,
    payload: Payload,
    latent_spec: LatentSpec,
    time: float,
    *,
    guidance: float | None = None,
) -> torch.Tensor:
    guidance = denoising.neutral_guidance if guidance is None else guidance
    state = latents.drawn(latent_spec, 1, 3)
    with torch.no_grad():
        return denoising.velocity(module, state, torch.tensor([time]), [payload], guidance=guidance)


def _densities(
    denoising: Denoising, module: torch.nn.Module, payload: Payload, prompt: Payload, latent_spec: LatentSpec
) -> torch.Tensor:
    """The log-probs of a payload's transitions by the velocity, in float64 but for this."""
    guidance = float(latents.tensor(payload, "guidance"))
    states, places_N2 = latents.tensor(payload, "states"), latents.tensor(payload, "places").long()
    before, after = states[places_N2[:, 0]], states[places_N2[:, 1]]
    times_N = latents.tensor(payload, "times")
    velocity = denoising.velocity(module, before, times_N, [prompt] * len(times_N), guidance=guidance).double()
    a_N, b_N, std_N = (each[:, None, None, None, None] for each in latents.tensor(payload, "steps").double().unbind(1))
    apart = after - a_N * before - b_N * velocity - latents.tensor(payload, "offsets")
    density = -apart.square() / (2 * std_N.square()) - std_N.log() - 0.5 * math.log(2 * math.pi)
    return latents.mean(density, latent_spec).float()


@contextmanager
def _counted(module: torch.nn.Module) -> Iterator[list[int]]:
    """Number of rows that linear layers are given, in all, while it lasts."""
    counts = [0]

    def count(layer: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        if isinstance(layer, torch.nn.Linear):
            counts[0] += given[0].numel() // max(1, given[0].shape[-1])

    handles = [each.register_forward_pre_hook(count) for each in module.modules()]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


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
        latent_spec = model.latent_spec(payload)
        state = latents.drawn(latent_spec, 1, 0)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
            velocity = model.velocity(module, state, torch.tensor([0.5]), [payload], guidance=model.neutral_guidance)
        if bool(velocity.any()):
            pytest.skip("without weights, the velocity of this family is not zero")
        noised = noising.noised(payload, _SEED, num_decisions=_NUMBER)
        errors = []
        for level in (0.0, 1.0, -1.0):
            sample = torch.full(latent_spec.shape, level)
            arrays = {**noised.arrays, "sample": latents.array(sample)}
            with torch.no_grad():
                errors.append(-decide_each(model, module, [attrs.evolve(noised, arrays=arrays)])[0].logprobs_N)
        # (e - 1)² + (e + 1)² - 2 e² is 2 at each place, whatever e.
        if not torch.allclose(errors[1] + errors[2] - 2 * errors[0], torch.full((_NUMBER,), 2.0), atol=1e-3):
            fault(
                "log-probs of regressions are not minus the mean squared distance of the velocity to e - sample: with "
                f"a velocity of 0 they are {[(-each).tolist() for each in errors]} for samples of 0, 1 and -1"
            )
        number = (
            state[0].numel() if latent_spec.is_given_T is None else int(state[0][:, ~latent_spec.is_given_T].numel())
        )
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
