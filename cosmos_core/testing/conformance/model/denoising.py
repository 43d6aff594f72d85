"""Tests of world models: what engines ask of them, and regressions at drawn points.

Shape legend: B latents of a batch, N decisions of a payload, C channels, T latent frames, H and W latent height and
width.
"""

from __future__ import annotations

import math
from typing import Any, Final, TypeAlias

import attrs
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cosmos_core.models.diffusion.arrays import with_tensors
from cosmos_core.protocols import Decided
from cosmos_core.protocols.world import LatentSpec, WorldModel
from cosmos_core.testing.conformance.model.subject import Subject, contents, expect_close, skip_rest, tensor
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Payload

_SEED: Final = 7
_NUMBER: Final = 6


def drawn(latent_spec: LatentSpec, number: int, seed: int) -> torch.Tensor:
    """Latents from noise, float32 [number, C, T, H, W], with the frames that the latent_spec gives in place."""
    latents = torch.randn(number, *latent_spec.shape, generator=torch.Generator().manual_seed(seed))
    if latent_spec.given is None or latent_spec.is_given_T is None:
        return latents
    return torch.where(latent_spec.is_given_T[:, None, None], latent_spec.given, latents)


def walked(prompt: Payload, latent_spec: LatentSpec, *, number: int, guidance: float, seed: int = 0) -> Payload:
    """Transitions whose states and steps are made up; the last has an offset, too."""
    places_N, offsets = torch.arange(number, dtype=torch.int32), torch.zeros(number, *latent_spec.shape)
    offsets[-1] = 0.1
    steps = torch.rand(number, 3, generator=torch.Generator().manual_seed(seed)) + torch.tensor([0.5, -1.0, 0.3])
    made = {
        "states": drawn(latent_spec, number + 1, seed + 1),
        "places": torch.stack([places_N, places_N + 1], 1),
        "times": torch.linspace(1.0, 0.2, number),
        "steps": steps,
        "offsets": offsets,
        "guidance": torch.tensor(guidance),
    }
    return with_tensors(prompt, made)


def left(payload: Payload) -> torch.Tensor:
    """The states [N, C, T, H, W] that a payload's transitions leave."""
    return tensor(payload, "states")[tensor(payload, "places")[:, 0].long()]


def transitions(payload: Payload, velocity_N: torch.Tensor, is_given_T: torch.Tensor | None = None) -> Decided:
    """What transitions are by the velocities at the states that they leave: normal round a x_t + b v + offset."""
    after = tensor(payload, "states")[tensor(payload, "places")[:, 1].long()]
    a_N, b_N, std_N = (each[:, None, None, None, None] for each in tensor(payload, "steps").double().unbind(1))
    mean = a_N * left(payload) + b_N * velocity_N.double() + tensor(payload, "offsets")
    log_std = std_N.log() + 0.5 * math.log(2 * math.pi)
    density, entropy = -((after - mean) / std_N).square() / 2 - log_std, (log_std + 0.5).expand_as(mean)
    is_decided_T = slice(None) if is_given_T is None else ~is_given_T
    means = [each[:, :, is_decided_T].flatten(1).mean(1).float() for each in (density, entropy)]
    return Decided(logprobs_N=means[0], entropy_N=means[1])


Row: TypeAlias = tuple[Payload, LatentSpec]


@attrs.frozen(eq=False)
class _World:
    """A model that denoises with another instance of it, its weights, and its rows with the latent_spec of each."""

    model: WorldModel
    another: WorldModel
    module: torch.nn.Module
    rows: list[Row]

    @classmethod
    def of(cls, subject: Subject) -> _World:
        """The model, if it denoises; else the test is skipped."""
        model: Any = subject.optional(WorldModel, "the model does not denoise")
        another: Any = subject.maker()
        encoded = map(model.encode, subject.prompts)
        return cls(model, another, subject.module, [(payload, model.latent_spec(payload)) for payload in encoded])

    @torch.no_grad()
    def velocity(self, row: Row, time: float, *, beside: float = 0.0) -> torch.Tensor:
        """The velocity [1, C, T, H, W] of a row's noise, at a guidance so far beside the neutral one."""
        state, guidance = drawn(row[1], 1, 3), self.model.neutral_guidance + beside
        return self.model.velocity(self.module, state, torch.tensor([time]), [row[0]], guidance=guidance)


class DenoisingTests:
    """Tests of a model that is a `WorldModel`."""

    def test_a_latent_spec_says_what_is_denoised(self, subject: Subject) -> None:
        """An engine draws noise of its shape, keeps what is given, and shows rewards and reports the frames."""
        world = _World.of(subject)
        for payload, latent_spec in world.rows:
            _check_latent_spec(latent_spec)
            for when, model in (("a second time", world.model), ("by another instance", world.another)):
                if _told(latent_spec) != _told(model.latent_spec(payload)):
                    fault(f"latent_spec() says something else {when}; go by the payload and the options alone")
        for payload, latent_spec in world.rows[:2]:
            state = drawn(latent_spec, 1, 0)[0]
            shown, again, other = (world.model.render(each, payload) for each in (state, state, -state))
            _check_shown(shown)
            if contents(again) != contents(shown):
                fault("render() gives other frames of the same latents; draw nothing")
            if contents(other)["frames"] == contents(shown)["frames"]:
                fault("render() gives the same frames of other latents")

    def test_velocities_depend_on_the_row_alone(self, subject: Subject) -> None:
        """At each time from data to noise: on its text and given frames, and not on what an engine batches with it."""
        world = _World.of(subject)
        for row in world.rows:
            shape, is_given_T = (1, *row[1].shape), row[1].is_given_T
            for time in (0.0, 0.31, 1.0):
                first, second = (world.velocity(row, time) for _ in range(2))
                if first.shape != shape or first.dtype != torch.float32:
                    fault(f"velocity() gave {first.dtype} {tuple(first.shape)}; give float32 of their shape, {shape}")
                if not bool(first.isfinite().all()):
                    fault(f"velocity() at time {time:g} is not finite; times are in [0, 1], both ends included")
                if not torch.equal(first, second):
                    fault("velocity() gives other numbers the second time; draw nothing, and leave no dropout on")
                if is_given_T is not None and bool(first[:, :, is_given_T].any()):
                    fault("velocity() moves frames that are given; give zero there")
                if is_given_T is not None and not bool(first[:, :, ~is_given_T].any()):
                    fault("velocity() is zero in frames that are not given, where one is")
        _check_batched(world)
        # Metadata may say more than the text: an embedding of it, for one.
        plain = [(p, row) for p, row in zip(subject.prompts, world.rows, strict=True) if not p.metadata]
        texts = {prompt.text for prompt, _ in plain if isinstance(prompt.text, str)}
        others = [
            (row, (subject.model.encode(attrs.evolve(prompt, text=text)), row[1]))
            for prompt, row in plain
            for text in sorted(texts - {prompt.text})
        ]
        if others and all(torch.equal(world.velocity(one, 0.5), world.velocity(other, 0.5)) for one, other in others):
            fault("velocity() is the same for a row whatever its text says; of a model without texts, give one")
        skip_rest(
            {
                "not given: two rows of other texts, without metadata": not others,
                "not given: no row of `prompts` gives frames": all(row[1].is_given_T is None for row in world.rows),
            }
        )

    def test_guidance_begins_at_the_neutral_one(self, subject: Subject) -> None:
        """Guided velocities lie on a line, on which the neutral guidance is the prompt's own, in fewer forwards."""
        world, found, work = _World.of(subject), [], []
        for beside in (0.0, 1.0, 2.0):
            with FlopCounterMode(display=False) as counted:
                found.append(world.velocity(world.rows[0], 0.6, beside=beside))
            work.append(counted.get_total_flops())
        neutral = world.model.neutral_guidance
        what = f"velocities at guidance {neutral:g} and 1 and 2 above it do not lie on a line; guidance is a blend"
        expect_close(found[2] - found[1], found[1] - found[0], what, rtol=1e-3, atol=1e-3)
        if torch.allclose(found[1], found[0], rtol=1e-4, atol=1e-4):
            fault("velocity() does not change with the guidance")
        if not work[0] < work[1]:
            fault(f"at the neutral guidance {neutral:g} as much is computed as at another; one forward is enough there")

    def test_transitions_are_normal_round_what_the_velocity_says(self, subject: Subject) -> None:
        """The log-prob is the density's mean over what is decided, whichever sampler made it, guided or not."""
        world = _World.of(subject)
        for guidance in (world.model.neutral_guidance, world.model.neutral_guidance + 2.0):
            made = [
                walked(payload, latent_spec, number=2 + index % 2, guidance=guidance, seed=10 * index)
                for index, (payload, latent_spec) in enumerate(world.rows)
            ]
            for index, found_N in enumerate(subject.logprobs(payloads=made)):
                (prompt, latent_spec), times_N = world.rows[index], tensor(made[index], "times")
                with torch.no_grad():
                    velocity_N = world.model.velocity(
                        world.module, left(made[index]), times_N, [prompt] * len(times_N), guidance=guidance
                    )
                what = (
                    f"log-probs of transitions of row {index} at guidance {guidance:g} are not what by velocity() they "
                    "are: the mean over what is decided of the normal log-density round a x_t + b v + offset"
                )
                expect_close(found_N, transitions(made[index], velocity_N, latent_spec.is_given_T).logprobs_N, what)

    def test_points_are_drawn_by_the_seed_alone(self, subject: Subject) -> None:
        """A resumed run, and each process that shares a sequence, learns the same; the next epoch learns others."""
        world, samples = _World.of(subject), _samples(subject)
        for payload in samples:
            before = dict(payload.arrays)
            if "sample" not in before:
                fault(f"encode_demonstration() gave arrays {sorted(before)}; give the `sample` to imitate")
            first, again, other = (world.model.noised(payload, seed) for seed in (_SEED, _SEED, _SEED + 1))
            elsewhere = world.another.noised(payload, _SEED)
            for when, found in (("a second time", again), ("by another instance", elsewhere)):
                if contents(found) != contents(first):
                    fault(f"noised() draws other points {when} from the same seed; draw from the seed alone")
            if contents(other) == contents(first):
                fault("noised() draws the same points from another seed, so a row is always learned at the same ones")
            chosen = world.model.noised(payload, _SEED, num_decisions=_NUMBER)
            for made in (first, chosen):
                _check_points(made)
                if any(
                    held.get(name) is not each
                    for name, each in before.items()
                    for held in (payload.arrays, made.arrays)
                ):
                    fault(f"noised() changed one of {sorted(before)}; give what there was as it is")
            if (number := chosen.arrays["times"].shape[0]) != _NUMBER:
                fault(f"noised(num_decisions={_NUMBER}) drew {number} times")

    def test_regressions_are_errors_of_the_velocity(self, subject: Subject) -> None:
        """Minus the mean squared distance to e - x_0, e standard normal: seen with a velocity of zero."""
        world, payload = _World.of(subject), _samples(subject)[0]
        latent_spec = world.model.latent_spec(payload)
        with torch.no_grad():
            for parameter in subject.module.parameters():
                parameter.zero_()
        if bool(world.velocity((payload, latent_spec), 0.5).any()):
            pytest.skip("without weights, the velocity of this family is not zero")
        noised = world.model.noised(payload, _SEED, num_decisions=_NUMBER)
        levels = [with_tensors(noised, {"sample": torch.full(latent_spec.shape, level)}) for level in (0.0, 1.0, -1.0)]
        zero_N, one_N, minus_N = (-subject.logprobs(payloads=[each])[0] for each in levels)
        # (e - 1)² + (e + 1)² - 2 e² is 2 at each place, whatever e.
        what = "log-probs of regressions are not minus the mean squared distance of the velocity to e - sample"
        expect_close(one_N + minus_N - 2 * zero_N, torch.full((_NUMBER,), 2.0), what, rtol=0, atol=1e-3)
        number = math.prod(latent_spec.shape)
        if latent_spec.is_given_T is not None:
            number = number // latent_spec.shape[1] * int((~latent_spec.is_given_T).sum())
        spread = 8 * (2.0 / number) ** 0.5
        if not bool(((zero_N - 1.0).abs() <= spread).all()) or len({*zero_N.tolist()}) < _NUMBER:
            fault(f"the mean squares of noise are {zero_N.tolist()}; draw normal noise, another for each")


def _check_latent_spec(latent_spec: LatentSpec) -> None:
    shape, given, is_given_T = latent_spec.shape, latent_spec.given, latent_spec.is_given_T
    if len(shape) != 4 or not all(isinstance(size, int) and size > 0 for size in shape):
        fault(f"latent_spec() has shape {shape}; give (channels, frames, height, width)")
    if (given is None) != (is_given_T is None):
        fault("latent_spec() has only one of given and is_given_T; give both, or neither")
    if given is not None and (given.shape != shape or given.dtype != torch.float32):
        fault(f"latent_spec().given is {given.dtype} {tuple(given.shape)}; give float32 {shape}")
    if is_given_T is not None and (
        is_given_T.shape != shape[1:2] or is_given_T.dtype != torch.bool or bool(is_given_T.all())
    ):
        fault(f"latent_spec().is_given_T is {is_given_T}; give bool [{shape[1]}], not all of them true")


def _told(latent_spec: LatentSpec) -> tuple[object, ...]:
    given = latent_spec.given, latent_spec.is_given_T
    return tuple(latent_spec.shape), *(None if each is None else each.tolist() for each in given)


def _check_shown(shown: Payload) -> None:
    if shown.kind != "media" or not {"frames", "fps"} <= shown.arrays.keys():
        fault(f"render() gave a payload of kind {shown.kind!r} with {sorted(shown.arrays)}; give frames and fps")
    frames, fps = shown.arrays["frames"], shown.arrays["fps"]
    if frames.dtype != "uint8" or len(frames.shape) != 4 or frames.shape[0] < 1 or frames.shape[3] != 3:
        fault(f"render() gave frames {frames.dtype} {frames.shape}; give uint8 [frames, height, width, 3]")
    if (fps.dtype, fps.shape) != ("float32", ()) or not float(tensor(shown, "fps")) > 0:
        fault(f"render() gave fps {fps.dtype} {fps.shape}; give a positive float32 []")


@torch.no_grad()
def _check_batched(world: _World) -> None:
    alike = [row for row in world.rows if row[1].shape == world.rows[0][1].shape]
    states = torch.cat([drawn(latent_spec, 1, index) for index, (_, latent_spec) in enumerate(alike)])
    times, payloads = torch.linspace(0.1, 0.9, len(alike)), [payload for payload, _ in alike]
    together, *alone = (
        world.model.velocity(
            world.module, states[part], times[part], payloads[part], guidance=world.model.neutral_guidance + 2.0
        )
        for part in (slice(None), *(slice(index, index + 1) for index in range(len(alike))))
    )
    for index, each in enumerate(alone):
        what = f"velocity() of row {index} changes with what else is in the batch"
        expect_close(together[index : index + 1], each, what)


def _samples(subject: Subject) -> list[Payload]:
    shown = [prompt for prompt in subject.prompts if prompt.demonstration is not None]
    if not shown:
        pytest.skip("not given: no row of `prompts` has a demonstration")
    return [subject.model.encode_demonstration(prompt) for prompt in shown]


def _check_points(payload: Payload) -> None:
    found = {name: (each.dtype, each.shape) for name, each in payload.arrays.items()}
    dtype, shape = found.get("times", ("", ()))
    if dtype != "float32" or len(shape) != 1 or not shape[0] or found.get("noise_seed") != ("int64", ()):
        fault(f"noised() gave {found}; give times, float32 [decisions], and a noise_seed, int64 []")
    times_N = tensor(payload, "times")
    if not bool(((times_N >= 0) & (times_N <= 1)).all()):
        fault(f"noised() drew times {times_N.tolist()}; 1 is noise and 0 is data")
