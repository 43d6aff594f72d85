"""Tests of world models: what engines ask of them, regressions at drawn points, and blends of predictions.

Shape legend: B latents of a batch, N decisions of a payload, K shares of a blend, C channels, T latent frames, H and W
latent height and width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import attrs
import pytest
import torch

from cosmos_core.models.diffusion.arrays import with_tensors
from cosmos_core.protocols import MicroBatch
from cosmos_core.protocols.frozen import Blend, Blended, KLTarget
from cosmos_core.protocols.world import LatentSpec, WorldModel
from cosmos_core.testing.conformance.model.subject import Subject, contents, expect_close, skip_rest, tensor
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Payload

_TIMES: Final = (0.0, 0.31, 1.0)
_BESIDE: Final = 2.0
"""A guidance beside the neutral one, by so much."""
_SEED: Final = 7
_NUMBER: Final = 6
_BLEND: Final = Blend(shares=(0.0, 0.5, 1.0, 2.0))


def drawn(latent_spec: LatentSpec, number: int, seed: int) -> torch.Tensor:
    """Latents from noise, float32 [number, C, T, H, W], with the frames that the latent_spec gives in place."""
    latents = torch.randn(number, *latent_spec.shape, generator=torch.Generator().manual_seed(seed))
    if latent_spec.given is None or latent_spec.is_given_T is None:
        return latents
    return torch.where(latent_spec.is_given_T[:, None, None], latent_spec.given, latents)


def walked(prompt: Payload, latent_spec: LatentSpec, *, number: int, guidance: float, seed: int = 0) -> Payload:
    """Transitions whose states and steps are made up; the last has an offset, too."""
    generator = torch.Generator().manual_seed(seed)
    places_N = torch.arange(number, dtype=torch.int32)
    steps = torch.rand(number, 3, generator=generator) + torch.tensor([0.5, -1.0, 0.3])
    offsets = torch.zeros(number, *latent_spec.shape)
    offsets[-1] = 0.1
    made = {
        "states": drawn(latent_spec, number + 1, seed + 1),
        "places": torch.stack([places_N, places_N + 1], 1),
        "times": torch.linspace(1.0, 0.2, number),
        "steps": steps,
        "offsets": offsets,
        "guidance": torch.tensor(guidance),
    }
    return with_tensors(prompt, made)


@attrs.frozen(eq=False)
class _World:
    """A model that denoises, its weights, and its rows with the latent_spec of each."""

    model: WorldModel
    module: torch.nn.Module
    rows: list[tuple[Payload, LatentSpec]]

    @classmethod
    def of(cls, subject: Subject) -> _World:
        """The model, if it denoises; else the test is skipped."""
        model: WorldModel = subject.optional(WorldModel, "the model does not denoise")
        encoded = map(subject.model.encode, subject.prompts)
        return cls(model, subject.module, [(payload, model.latent_spec(payload)) for payload in encoded])

    def velocity(self, row: tuple[Payload, LatentSpec], time: float, *, beside: float = 0.0) -> torch.Tensor:
        """The velocity [1, C, T, H, W] of a row's noise, at a guidance so far beside the neutral one."""
        payload, latent_spec = row
        guidance = self.model.neutral_guidance + beside
        with torch.no_grad():
            state = drawn(latent_spec, 1, 3)
            return self.model.velocity(self.module, state, torch.tensor([time]), [payload], guidance=guidance)


class DenoisingTests:
    """Tests of a model that is a `WorldModel`, or declares blends."""

    def test_a_latent_spec_says_what_is_denoised(self, subject: Subject) -> None:
        """An engine draws noise of its shape, keeps what is given, and shows rewards and reports the frames."""
        world = _World.of(subject)
        for payload, latent_spec in world.rows:
            _check_latent_spec(latent_spec)
            for when, again in (("a second time", world.model), ("by another instance", subject.make())):
                if not _is_same(latent_spec, again.latent_spec(payload)):
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
            for time in _TIMES:
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
            fault(
                "velocity() is the same for a row whatever its text says; encode() and the forward go by the text (if "
                "the model takes none, give `prompts` one text)"
            )
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
            with _counted(subject.module) as counts:
                found.append(world.velocity(world.rows[0], 0.6, beside=beside))
            work.append(counts[0])
        neutral = world.model.neutral_guidance
        what = f"velocities at guidance {neutral:g} and 1 and 2 above it do not lie on a line; guidance is a blend"
        expect_close(found[2] - found[1], found[1] - found[0], what, rtol=1e-3, atol=1e-3)
        if torch.allclose(found[1], found[0], rtol=1e-4, atol=1e-4):
            fault("velocity() does not change with the guidance")
        if not work[0] < work[1]:
            fault(
                f"at the neutral guidance of {neutral:g} as much is computed as at another; one forward is enough there"
            )

    def test_transitions_are_normal_round_what_the_velocity_says(self, subject: Subject) -> None:
        """The log-prob is the density's mean over what is decided, whichever sampler made it, guided or not."""
        world = _World.of(subject)
        for beside in (0.0, _BESIDE):
            guidance = world.model.neutral_guidance + beside
            made = [
                walked(payload, latent_spec, number=2 + index % 2, guidance=guidance, seed=10 * index)
                for index, (payload, latent_spec) in enumerate(world.rows)
            ]
            for index, found_N in enumerate(subject.logprobs(payloads=made)):
                what = (
                    f"log-probs of transitions of row {index} at guidance {guidance:g} are not what by velocity() they "
                    "are: the mean over what is decided of the normal log-density round a x_t + b v + offset"
                )
                expect_close(found_N, _densities(world, made[index], *world.rows[index]), what)

    def test_points_are_drawn_by_the_seed_alone(self, subject: Subject) -> None:
        """A resumed run, and each process that shares a sequence, learns the same; the next epoch learns others."""
        noising, samples = _noising(subject)
        for payload in samples:
            before = dict(payload.arrays)
            if "sample" not in before:
                fault(f"encode_demonstration() gave arrays {sorted(before)}; give the `sample` to imitate")
            first, again, elsewhere, other = (
                each.noised(payload, seed)
                for each, seed in ((noising, _SEED), (noising, _SEED), (subject.make(), _SEED), (noising, _SEED + 1))
            )
            for when, found in (("a second time", again), ("by another instance", elsewhere)):
                if contents(found) != contents(first):
                    fault(f"noised() draws other points {when} from the same seed; draw from the seed alone")
            if contents(other) == contents(first):
                fault("noised() draws the same points from another seed, so a row is always learned at the same ones")
            chosen = noising.noised(payload, _SEED, num_decisions=_NUMBER)
            for made in (first, chosen):
                _check_points(made)
                if any(each is not before.get(name) for name, each in payload.arrays.items()) or any(
                    made.arrays.get(name) is not each for name, each in before.items()
                ):
                    fault(f"noised() changed one of {sorted(before)}; give what there was as it is")
            if (number := chosen.arrays["times"].shape[0]) != _NUMBER:
                fault(f"noised(num_decisions={_NUMBER}) drew {number} times")

    def test_regressions_are_errors_of_the_velocity(self, subject: Subject) -> None:
        """Minus the mean squared distance to e - x_0, e standard normal: seen with a velocity of zero."""
        noising, samples = _noising(subject)
        world, payload = _World.of(subject), samples[0]
        latent_spec = world.model.latent_spec(payload)
        with torch.no_grad():
            for parameter in subject.module.parameters():
                parameter.zero_()
        if bool(world.velocity((payload, latent_spec), 0.5).any()):
            pytest.skip("without weights, the velocity of this family is not zero")
        noised = noising.noised(payload, _SEED, num_decisions=_NUMBER)
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
            fault(
                f"the mean square of the noise of {_NUMBER} decisions is {zero_N.tolist()}; draw standard normal "
                "noise, another for each"
            )

    def test_blends_lie_between_both_models(self, subject: Subject) -> None:
        """With all of the policy its own error, with none the other's: of x_0, t times that of the velocity."""
        if not subject.capabilities.blends:
            pytest.skip("it declares no blends")
        regressions = [payload for payload in subject.payloads if "noise_seed" in payload.arrays]
        if not regressions:
            fault("blends are declared, and no payload of the kit has regressions; add one to the fixture `payloads`")
        subject, neighbour = attrs.evolve(subject, payloads=regressions), subject.other_weights()
        batch = subject.batch
        blended = _blended(subject, neighbour, batch)
        squared_NK = blended.squared_NK.detach()
        squares_N = torch.cat([tensor(regressions[index], "times") for index in batch.sequences]).square()
        for whose, column, module in (("its own", 2, subject.module), ("the other model's", 0, neighbour)):
            with torch.no_grad():
                alone = [-subject.decide(subject.alone[index], module).logprobs_N for index in batch.sequences]
            what = (
                f"a blend with a share of {_BLEND.shares[column]:g} is off by what is not {whose} error of x_0, t² "
                "times the regression's, or changes with what else is packed"
            )
            expect_close(squared_NK[:, column], squares_N * torch.cat(alone), what)
        # A square of what is linear in the share: three shares tell the fourth.
        none, half, all_, twice = squared_NK.unbind(1)
        bend = 2 * (all_ - 2 * half + none)
        what = "errors of blends are no square of what is linear in the share; blend predictions, not errors"
        expect_close(twice, none + 2 * (all_ - none - bend) + 4 * bend, what, rtol=1e-3, atol=1e-3)
        _check_learnt(subject, blended)
        plain, asked = subject.decide(batch), subject.decide(batch, prediction_for=_BLEND)
        if plain.blended is not None or asked.blended is not None or plain.prediction is not None:
            fault("decide() gave blends, or a prediction, that were not asked for")
        expect_close(
            asked.logprobs_N,
            plain.logprobs_N,
            "log-probs change when the prediction is asked for",
            rtol=1e-5,
            atol=1e-6,
        )


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
    if is_given_T.shape != latent_spec.shape[1:2] or is_given_T.dtype != torch.bool or bool(is_given_T.all()):
        fault(f"latent_spec().is_given_T is {is_given_T}; give bool [{latent_spec.shape[1]}], not all of them true")


def _is_same(first: LatentSpec, second: LatentSpec) -> bool:
    return first.shape == second.shape and all(
        torch.equal(one, other) if one is not None and other is not None else one is other
        for one, other in ((first.given, second.given), (first.is_given_T, second.is_given_T))
    )


def _check_shown(shown: Payload) -> None:
    if shown.kind != "media" or not {"frames", "fps"} <= shown.arrays.keys():
        fault(f"render() gave a payload of kind {shown.kind!r} with {sorted(shown.arrays)}; give frames and fps")
    frames, fps = shown.arrays["frames"], shown.arrays["fps"]
    if frames.dtype != "uint8" or len(frames.shape) != 4 or frames.shape[0] < 1 or frames.shape[3] != 3:
        fault(f"render() gave frames {frames.dtype} {frames.shape}; give uint8 [frames, height, width, 3]")
    if (fps.dtype, fps.shape) != ("float32", ()) or not float(tensor(shown, "fps")) > 0:
        fault(f"render() gave fps {fps.dtype} {fps.shape}; give a positive float32 []")


def _check_batched(world: _World) -> None:
    shape = world.rows[0][1].shape
    alike = [(payload, latent_spec) for payload, latent_spec in world.rows if latent_spec.shape == shape]
    states = torch.cat([drawn(latent_spec, 1, index) for index, (_, latent_spec) in enumerate(alike)])
    times = torch.linspace(0.1, 0.9, len(alike))
    payloads, guidance = [payload for payload, _ in alike], world.model.neutral_guidance + _BESIDE
    with torch.no_grad():
        together = world.model.velocity(world.module, states, times, payloads, guidance=guidance)
        for index in range(len(alike)):
            part = slice(index, index + 1)
            alone = world.model.velocity(world.module, states[part], times[part], payloads[part], guidance=guidance)
            expect_close(together[part], alone, f"velocity() of row {index} changes with what else is in the batch")


def _densities(world: _World, payload: Payload, prompt: Payload, latent_spec: LatentSpec) -> torch.Tensor:
    """The log-probs [N] of a payload's transitions by the velocity, in float64 but for this."""
    states, places_N2, times_N, guidance = (tensor(payload, name) for name in ("states", "places", "times", "guidance"))
    before, after = (states[column.long()] for column in places_N2.unbind(1))
    with torch.no_grad():
        velocity = world.model.velocity(
            world.module, before, times_N, [prompt] * len(times_N), guidance=float(guidance)
        ).double()
    a_N, b_N, std_N = (each[:, None, None, None, None] for each in tensor(payload, "steps").double().unbind(1))
    apart = after - a_N * before - b_N * velocity - tensor(payload, "offsets")
    density = -apart.square() / (2 * std_N.square()) - std_N.log() - 0.5 * math.log(2 * math.pi)
    if latent_spec.is_given_T is not None:
        density = density[:, :, ~latent_spec.is_given_T]
    return density.flatten(1).mean(1).float()


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


def _noising(subject: Subject) -> tuple[WorldModel, list[Payload]]:
    """The model, and demonstrations before points are drawn."""
    noising: WorldModel = subject.optional(WorldModel, "the model does not denoise")
    shown = [prompt for prompt in subject.prompts if prompt.demonstration is not None]
    if not shown:
        pytest.skip("not given: no row of `prompts` has a demonstration")
    return noising, [subject.model.encode_demonstration(prompt) for prompt in shown]


def _check_points(payload: Payload) -> None:
    found = {name: (each.dtype, each.shape) for name, each in payload.arrays.items()}
    dtype, shape = found.get("times", ("", ()))
    if dtype != "float32" or len(shape) != 1 or not shape[0] or found.get("noise_seed") != ("int64", ()):
        fault(f"noised() gave {found}; give times, float32 [decisions], and a noise_seed, int64 []")
    times_N = tensor(payload, "times")
    if not bool(((times_N >= 0) & (times_N <= 1)).all()):
        fault(f"noised() drew times {times_N.tolist()}; 1 is noise and 0 is data")


def _blended(subject: Subject, neighbour: torch.nn.Module, batch: MicroBatch) -> Blended:
    """The blends of the module's predictions with another's."""
    with torch.no_grad():
        prediction = subject.decide(batch, neighbour, prediction_for=_BLEND).prediction
    if prediction is None:
        fault(f"decide(prediction_for={_BLEND}) gave no prediction")
    blended = subject.decide(batch, kl_target=KLTarget(prediction=prediction, comparison=_BLEND)).blended
    if blended is None:
        fault(f"decide(kl_target={_BLEND}) gave no blends")
    expected = sum(batch.num_decisions), len(_BLEND.shares)
    for name, values_NK in (("squared_NK", blended.squared_NK), ("absolute_NK", blended.absolute_NK)):
        if values_NK.shape != expected or values_NK.dtype != torch.float32 or not bool(values_NK.isfinite().all()):
            fault(f"{name} is {values_NK.dtype} {tuple(values_NK.shape)}; give finite float32 {expected}")
    return blended


def _check_learnt(subject: Subject, blended: Blended) -> None:
    """That squared errors carry the gradient of the policy's part, and absolute ones, that measure them, none."""
    if not blended.squared_NK.requires_grad:
        fault("squared errors of blends carry no gradient, so nothing would be learnt from them")
    if blended.absolute_NK.requires_grad:
        fault("absolute errors of blends carry a gradient; detach them")
    if bool((blended.absolute_NK.square() > blended.squared_NK.detach() * (1 + 1e-3) + 1e-5).any()):
        fault("a mean absolute error of a blend is larger than the root of the mean squared one")
    parameters = [parameter for parameter in subject.module.parameters() if parameter.requires_grad]
    sizes = []
    for column in (0, 2):
        total = blended.squared_NK[:, column].sum()
        grads = torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True)
        sizes.append(sum(float(grad.square().sum()) for grad in grads if grad is not None))
    if sizes[0] or not sizes[1] > 0:
        fault(
            f"the squared norm of the gradient of a blend with none of the policy is {sizes[0]:.3g}, and with all of "
            f"it {sizes[1]:.3g}"
        )
