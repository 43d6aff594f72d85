"""Tests of world models: what engines ask of them, and regressions at drawn points.

Shape legend: B latents of a batch, N decisions of a payload, C channels, T latent frames, H and W latent height and
width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import attrs
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cosmos_core.errors import DataError
from cosmos_core.models.diffusion.arrays import with_tensors
from cosmos_core.models.diffusion.packing import Decisions, trajectory_of
from cosmos_core.protocols import Decided
from cosmos_core.protocols.world import LatentSpec, WorldModel
from cosmos_core.testing.conformance.model.subject import (
    Subject,
    contents,
    expect_close,
    expect_each_close,
    expect_tensor,
    skip_rest,
    tensor_of,
)
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Payload

_SEED: Final = 7
_NUMBER: Final = 6


def drawn(latent_spec: LatentSpec, number: int, seed: int) -> torch.Tensor:
    """Latents from noise, float32 [number, C, T, H, W], with the frames that the latent_spec gives in place."""
    generator = torch.Generator().manual_seed(seed)
    return latent_spec.with_given(torch.randn(number, *latent_spec.shape, generator=generator))


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


def scored(
    payload: Payload,
    latent_spec: LatentSpec,
    neutral_guidance: float,
    velocity: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor],
) -> Decided:
    """The decisions of a payload by the velocities [N, C, T, H, W] of its states, times and guidance."""
    trajectory, is_given_T = trajectory_of(payload, latent_spec.shape, neutral_guidance), ~_decided(latent_spec)
    decisions = Decisions({**trajectory.at(slice(None)), "is_given": is_given_T.expand(trajectory.num_decisions, -1)})
    return decisions.decide(velocity(decisions.latents_N, decisions.times_N, trajectory.guidance), with_entropy=True)


def _decided(latent_spec: LatentSpec) -> torch.Tensor:
    """bool [T], the frames that are not given."""
    given_T = latent_spec.is_given_T
    return torch.ones(latent_spec.shape[1], dtype=torch.bool) if given_T is None else ~given_T


Row: TypeAlias = tuple[Payload, LatentSpec]


@attrs.frozen(eq=False)
class _World:
    """A model that denoises, its weights, and its rows with the latent_spec of each."""

    model: WorldModel
    module: torch.nn.Module
    rows: list[Row]

    @classmethod
    def of(cls, subject: Subject) -> _World:
        """The model, if it denoises; else the test is skipped."""
        model: Any = subject.optional(WorldModel, "the model does not denoise")
        encoded = map(model.encode, subject.prompts)
        return cls(model, subject.module, [(payload, model.latent_spec(payload)) for payload in encoded])

    @torch.no_grad()
    def velocity(self, prompt: Payload, states_N: torch.Tensor, times_N: torch.Tensor, guidance: float) -> torch.Tensor:
        """The velocities [N, C, T, H, W] of states for a prompt."""
        return self.model.velocity(self.module, states_N, times_N, [prompt] * len(times_N), guidance=guidance)

    def start(self, row: Row, time: float, *, beside: float = 0.0) -> torch.Tensor:
        """The velocity [1, C, T, H, W] of a row's noise, at a guidance so far beside the neutral one."""
        guidance = self.model.neutral_guidance + beside
        return self.velocity(row[0], drawn(row[1], 1, 3), torch.tensor([time]), guidance)

    def noised(self, payload: Payload) -> Payload:
        """A payload at as many points as the kit asks for."""
        made = self.model.noised(payload, _SEED, num_decisions=_NUMBER)
        try:
            found = trajectory_of(made, self.model.latent_spec(payload).shape, self.model.neutral_guidance)
        except DataError as error:
            fault(f"noised() gave no points to learn at; give times and a noise_seed: {error}")
        if found.num_decisions != _NUMBER:
            fault(f"noised(num_decisions={_NUMBER}) drew {found.num_decisions} times")
        return made


class DenoisingTests:
    """Tests of a model that is a `WorldModel`."""

    def test_a_latent_spec_says_what_is_denoised(self, subject: Subject) -> None:
        """An engine draws noise of its shape, keeps what is given, and shows rewards and reports the frames."""
        world = _World.of(subject)
        for payload, latent_spec in world.rows:
            _check_latent_spec(latent_spec)
            if _told(latent_spec) != _told(world.model.latent_spec(payload)):
                fault("latent_spec() says something else a second time; go by the payload and the options alone")
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
            for time in (0.0, 0.31, 1.0):
                first, second = (world.start(row, time) for _ in range(2))
                expect_tensor(f"velocity() at time {time:g} (of 0 to 1)", first, (1, *row[1].shape))
                if not torch.equal(first, second):
                    fault("velocity() gives other numbers the second time; draw nothing, and leave no dropout on")
                given, decided = (first[:, :, each] for each in (~_decided(row[1]), _decided(row[1])))
                if bool(given.any()) or not bool(decided.any()):
                    fault("velocity() moves frames that are given, or none of the others; give zero where one is given")
        _check_batched(world)
        # Metadata may say more than the text: an embedding of it, for one.
        plain = [(p, row) for p, row in zip(subject.prompts, world.rows, strict=True) if not p.metadata]
        texts = {prompt.text for prompt, _ in plain if isinstance(prompt.text, str)}
        others = [
            (row, (subject.model.encode(attrs.evolve(prompt, text=text)), row[1]))
            for prompt, row in plain
            for text in sorted(texts - {prompt.text})
        ]
        if others and all(torch.equal(world.start(one, 0.5), world.start(other, 0.5)) for one, other in others):
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
                found.append(world.start(world.rows[0], 0.6, beside=beside))
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
            made, expected = [], []
            for index, (prompt, latent_spec) in enumerate(world.rows):
                made.append(walked(prompt, latent_spec, number=2 + index % 2, guidance=guidance, seed=10 * index))
                velocity = functools.partial(world.velocity, prompt)
                expected.append(scored(made[index], latent_spec, guidance, velocity).logprobs_N)
            what = (
                f"log-probs of transitions at guidance {guidance:g} are not what by velocity() they are: the mean over "
                "what is decided of the normal log-density round a x_t + b v + offset"
            )
            expect_each_close(attrs.evolve(subject, payloads=made).logprobs(world.module), expected, what, 1e-4)

    def test_points_are_drawn_by_the_seed_alone(self, subject: Subject) -> None:
        """A resumed run, and each process that shares a sequence, learns the same; the next epoch learns others."""
        world = _World.of(subject)
        for payload in _samples(subject):
            before = dict(payload.arrays)
            if "sample" not in before:
                fault(f"encode_demonstration() gave arrays {sorted(before)}; give the `sample` to imitate")
            first, again, other = (world.model.noised(payload, seed) for seed in (_SEED, _SEED, _SEED + 1))
            if contents(again) != contents(first):
                fault("noised() draws other points a second time from the same seed; draw from the seed alone")
            if contents(other) == contents(first):
                fault("noised() draws the same points from another seed, so a row is always learned at the same ones")
            for held in (payload, first, world.noised(payload)):
                if any(held.arrays.get(name) is not each for name, each in before.items()):
                    fault(f"noised() changed one of {sorted(before)}; give what there was as it is")

    def test_regressions_are_errors_of_the_velocity(self, subject: Subject) -> None:
        """Minus the mean squared distance to e - x_0, e standard normal: seen with a velocity of zero."""
        world, payload = _World.of(subject), _samples(subject)[0]
        latent_spec = world.model.latent_spec(payload)
        with torch.no_grad():
            for parameter in world.module.parameters():
                parameter.zero_()
        if bool(world.start((payload, latent_spec), 0.5).any()):
            pytest.skip("without weights, the velocity of this family is not zero")
        noised = world.noised(payload)
        levels = [with_tensors(noised, {"sample": torch.full(latent_spec.shape, level)}) for level in (0.0, 1.0, -1.0)]
        zero_N, one_N, minus_N = (-each for each in attrs.evolve(subject, payloads=levels).logprobs(world.module))
        # (e - 1)² + (e + 1)² - 2 e² is 2 at each place, whatever e.
        what = "log-probs of regressions are not minus the mean squared distance of the velocity to e - sample"
        expect_close(one_N + minus_N - 2 * zero_N, torch.full((_NUMBER,), 2.0), what, rtol=0, atol=1e-3)
        number = torch.ones(latent_spec.shape)[:, _decided(latent_spec)].numel()
        spread = 8 * (2.0 / number) ** 0.5
        if not bool(((zero_N - 1.0).abs() <= spread).all()) or len({*zero_N.tolist()}) < _NUMBER:
            fault(f"the mean squares of noise are {zero_N.tolist()}; draw normal noise, another for each")


def _check_latent_spec(latent_spec: LatentSpec) -> None:
    shape, given, is_given_T = latent_spec.shape, latent_spec.given, latent_spec.is_given_T
    if len(shape) != 4 or not all(isinstance(size, int) and size > 0 for size in shape):
        fault(f"latent_spec() has shape {shape}; give (channels, frames, height, width)")
    if (given is None) != (is_given_T is None):
        fault("latent_spec() has only one of given and is_given_T; give both, or neither")
    if given is not None:
        expect_tensor("given of latent_spec()", given, shape)
        expect_tensor("is_given_T of latent_spec()", is_given_T, shape[1:2], torch.bool)


def _told(latent_spec: LatentSpec) -> tuple[object, ...]:
    given = latent_spec.given, latent_spec.is_given_T
    return tuple(latent_spec.shape), *(None if each is None else each.tolist() for each in given)


def _check_shown(shown: Payload) -> None:
    found = {name: (each.dtype, len(each.shape), *each.shape[3:]) for name, each in shown.arrays.items()}
    if (shown.kind, found) != ("media", {"frames": ("uint8", 4, 3), "fps": ("float32", 0)}):
        fault(
            f"render() gave a payload of kind {shown.kind!r} with {found}; give kind media, with frames uint8 [frames, "
            "height, width, 3] and fps float32 []"
        )
    if not shown.arrays["frames"].shape[0] or not float(tensor_of(shown, "fps")) > 0:
        fault("render() gave no frame, or a rate `fps` that is not positive")


@torch.no_grad()
def _check_batched(world: _World) -> None:
    rows = [row for row in world.rows if row[1].shape == world.rows[0][1].shape]
    states, times = (
        torch.cat([drawn(row[1], 1, index) for index, row in enumerate(rows)]),
        torch.linspace(0.1, 0.9, len(rows)),
    )
    guidance, payloads = world.model.neutral_guidance + 2.0, [payload for payload, _ in rows]
    together = world.model.velocity(world.module, states, times, payloads, guidance=guidance)
    alone = [world.velocity(each, states[n, None], times[n, None], guidance)[0] for n, each in enumerate(payloads)]
    expect_each_close([*together], alone, "velocity() changes with what else is in the batch", 1e-4)


def _samples(subject: Subject) -> list[Payload]:
    shown = [prompt for prompt in subject.prompts if prompt.demonstration is not None]
    if not shown:
        pytest.skip("not given: no row of `prompts` has a demonstration")
    return [subject.model.encode_demonstration(prompt) for prompt in shown]
