"""Gradients: those of the log-probabilities, for every element of every parameter, however sequences are packed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs
import pytest
import torch

from cosmos_core.config.job import Stage
from cosmos_core.config.schema import OptimizerConfig, PolicyConfig
from cosmos_core.policy.batches.batch import Counts, Share, TrainSequence
from cosmos_core.policy.processes.group import solo
from cosmos_core.policy.processes.world import single_world
from cosmos_core.policy.training.metrics import Stopwatch
from cosmos_core.policy.training.trainer import Trainer
from cosmos_core.protocols import MicroBatch, Model
from cosmos_core.testing.conformance.model.subject import (
    CPU,
    ROOM,
    SEED,
    ModelSetting,
    Reload,
    copied,
    decide_each,
    disturb,
    first_difference,
    pack_alone,
    total_logprob,
)
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.testing.layouts import Imitation
from cosmos_core.types import Payload, Prompt
from cosmos_core.weights.shards import ShardMap, canonical_tensors
from cosmos_core.weights.slices import size

_AIM: Final = 0.01
"""Change of the total log-prob, in nats, for which a parameter is moved along its gradient: far below curvature."""
_SHORTER: Final = 0.125
"""Part of the move that is tried when the whole one fails: it may have crossed the boundary between two experts."""
_FURTHEST: Final = 0.01
"""Longest move, as a part of the parameter's own length plus one."""
_ERROR: Final = 0.02
"""Part by which a promise may be missed."""
_ROUNDING: Final = 2e-7
"""Part of the total log-prob that rounding in float32 may add."""
_STILL: Final = 1e-5
"""Change of the total log-prob, in nats, that is no change, on top of five times the rounding: the move is long."""
_AUTOCAST_ERROR: Final = 0.5
"""Distance between a gradient in bfloat16 and in float32, as a part of its length."""


class ModelGradients(ModelSetting):
    """The gradient that `decide` carries."""

    @pytest.fixture
    def temperature(self) -> float:
        """One at which a forgotten division shows."""
        return next((each for each in self.temperatures if each != 1.0), 1.0)

    def test_every_parameter_gets_a_gradient(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload]
    ) -> None:
        """A parameter that no decision depends on is published and stored for nothing, or was forgotten."""
        _backward(model, module, payloads)
        uncovered = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
        if uncovered:
            fault(
                f"{len(uncovered)} parameters have no gradient, so no decision depends on them: "
                f"{', '.join(uncovered[:5])}; use them in decide(), drop them, or set requires_grad = False"
            )

    def test_gradients_are_those_of_the_log_probs(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload], temperature: float
    ) -> None:
        """Each parameter is moved a little along its gradient; the log-probs must rise by what the gradient says."""
        _backward(model, module, payloads, temperature)
        slope = _Slope(model=model, module=module, batches=model.pack(payloads, budget=ROOM), temperature=temperature)
        rounding = _ROUNDING * abs(slope.total())
        for name, parameter in module.named_parameters():
            if (move := _Move.along(parameter)) is None:
                continue
            risen = slope.broken(parameter, move, rounding)
            if risen is not None:
                fault(
                    f"the gradient of {name} is wrong: at temperature {temperature:g} it promises that the total "
                    f"log-prob changes by {move.predicted:.3g}, and it changes by {risen:.3g}; look for detach(), "
                    "no_grad() or a scale between this parameter and the log-probs"
                )

    def test_what_has_no_gradient_changes_nothing(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload], temperature: float
    ) -> None:
        """A gradient that is cut for some rows or columns leaves them as they were drawn, for ever."""
        _backward(model, module, payloads, temperature)
        slope = _Slope(model=model, module=module, batches=model.pack(payloads, budget=ROOM), temperature=temperature)
        allowed = 5 * _ROUNDING * abs(slope.total()) + _STILL
        for name, parameter in module.named_parameters():
            if (move := _Move.aside(parameter)) is None:
                continue
            risen = slope.broken(parameter, move, allowed)
            if risen is not None:
                still = int((move.step != 0).sum())
                fault(
                    f"the gradient of {name} is cut: it is 0 for {still} of {parameter.numel()} elements, and moving "
                    f"those changes the total log-prob by {risen:.3g}; look for a mask, a hook, detach() or no_grad() "
                    "on a part of this parameter"
                )

    def test_gradients_equal_those_of_each_sequence_alone(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload], temperature: float
    ) -> None:
        """A step's gradient does not depend on how its batch was packed."""
        together = _backward(model, module, payloads, temperature)
        module.zero_grad()
        for payload in payloads:
            alone = model.decide(module, pack_alone(model, payload), temperature=temperature, with_entropy=True)
            alone.logprobs_N.sum().backward()  # type: ignore[no-untyped-call]
        for name, parameter in module.named_parameters():
            if parameter.grad is None or name not in together:
                continue
            scale = float(parameter.grad.abs().max())
            error = float((together[name] - parameter.grad).abs().max())
            if not error <= 1e-3 * max(scale, 1.0):
                fault(
                    f"the gradient of {name} changes with how sequences are packed: by {error:.2g}, where the largest "
                    f"of each sequence alone is {scale:.2g}"
                )

    def test_gradients_under_autocast_are_nearly_the_same(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload]
    ) -> None:
        """A trainer runs `decide` under bfloat16 autocast unless the recipe asks for float32."""
        exact = _backward(model, module, payloads)
        with torch.autocast("cpu", torch.bfloat16):
            found = _backward(model, module, payloads)
        if missing := sorted(exact.keys() - found.keys()):
            fault(f"under bfloat16 autocast {len(missing)} parameters have no gradient: {', '.join(missing[:5])}")
        length = _length(exact)
        error = _length({name: found[name] - gradient for name, gradient in exact.items()}) / max(length, 1e-30)
        if not error <= _AUTOCAST_ERROR:
            fault(
                f"under bfloat16 autocast the gradient is off by {error:.0%} of its length (allowed "
                f"{_AUTOCAST_ERROR:.0%}); look for what decide() does otherwise where torch.is_autocast_enabled()"
            )


@attrs.frozen(kw_only=True, eq=False)
class _Move:
    """A small step of one parameter.

    Attributes:
        step: What is added to the parameter.
        predicted: By how much its gradient says that the total log-prob rises.
    """

    step: torch.Tensor
    predicted: float

    @classmethod
    def along(cls, parameter: torch.nn.Parameter) -> _Move | None:
        """Along the gradient; None where it is zero, or not asked for."""
        if parameter.grad is None or not parameter.grad.any():
            return None
        slope = float(parameter.grad.norm())
        length = min(_AIM / slope, _furthest(parameter))
        return cls(step=parameter.grad * (length / slope), predicted=length * slope)

    @classmethod
    def aside(cls, parameter: torch.nn.Parameter) -> _Move | None:
        """Anywhere among the elements whose gradient is exactly 0; None where there are none."""
        if not parameter.requires_grad or (parameter.grad is not None and parameter.grad.all()):
            return None
        drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
        if parameter.grad is not None:
            drawn = drawn * (parameter.grad == 0)
        return cls(step=drawn * (_furthest(parameter) / float(drawn.norm())), predicted=0.0)

    def shortened(self, part: float) -> _Move:
        """The same move, not as far."""
        return _Move(step=self.step * part, predicted=self.predicted * part)


@attrs.frozen(kw_only=True, eq=False)
class _Slope:
    """The total log-prob of some micro-batches, as a function of the parameters."""

    model: Model
    module: torch.nn.Module
    batches: Sequence[MicroBatch]
    temperature: float

    def total(self) -> float:
        """With the parameters as they are."""
        return total_logprob(self.model, self.module, self.batches, temperature=self.temperature)

    def broken(self, parameter: torch.nn.Parameter, move: _Move, allowed: float) -> float | None:
        """By how much the total rises with a move, if neither it nor a shorter one keeps what it predicts."""
        rises = []
        for each in (move, move.shortened(_SHORTER)):
            rises.append(self._rise(parameter, each))
            if abs(rises[-1] - each.predicted) <= _ERROR * each.predicted + allowed:
                return None
        return rises[0]

    def _rise(self, parameter: torch.nn.Parameter, move: _Move) -> float:
        """By how much the total rises with the move, as half of the way from minus to plus."""
        kept = parameter.detach().clone()
        totals = []
        for sign in (1.0, -1.0):
            with torch.no_grad():
                parameter.copy_(kept + sign * move.step)
            totals.append(self.total())
        with torch.no_grad():
            parameter.copy_(kept)
        return (totals[0] - totals[1]) / 2.0


def _furthest(parameter: torch.nn.Parameter) -> float:
    return _FURTHEST * (1.0 + float(parameter.detach().norm()))


def _length(gradients: Mapping[str, torch.Tensor]) -> float:
    """Of all gradients together."""
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))


def _backward(
    model: Model, module: torch.nn.Module, payloads: Sequence[Payload], temperature: float = 1.0
) -> dict[str, torch.Tensor]:
    """Gradients of the log-probability of everything, left in the parameters too."""
    module.zero_grad()
    found = decide_each(model, module, payloads, temperature=temperature, with_entropy=True)
    total = torch.stack([each.logprobs_N.sum() for each in found]).sum()
    if not total.requires_grad:
        fault(
            "log-probs carry no gradient (decided with_entropy=True"
            f"{', under bfloat16 autocast' if torch.is_autocast_enabled('cpu') else ''}); decide() must not run under "
            "no_grad(), nor detach what it returns"
        )
    with torch.autocast("cpu", enabled=False):
        total.backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def imitate(model: Model, module: torch.nn.Module, payloads: Sequence[Payload], *, steps: int) -> list[float]:
    """Train a module on payloads, in place, in float32.

    Returns:
        The loss of each step, before it was applied.
    """
    policy = PolicyConfig(precision="fp32", micro_batch_units=ROOM)
    trainer = Trainer(model=model, module=module, policy=policy, device=torch.device("cpu"), world=single_world())
    trainer.begin_stage(_stage(steps), Imitation(), 1.0)
    sequences = tuple(TrainSequence(payload=payload, advantage=1.0) for payload in payloads)
    totals = Counts(
        sequences=len(payloads),
        decisions=sum(pack_alone(model, payload).num_decisions[0] for payload in payloads),
        trained=len(payloads),
    )
    watch = Stopwatch(trainer.device)
    share = Share(sequences=sequences, counts=totals)
    return [trainer.train(share, totals, solo(), watch).meter.report()["loss"] for _ in range(steps)]


def _stage(steps: int) -> Stage:
    return Stage(
        index=0,
        key="algorithm",
        plugin="imitation",
        options={},
        steps=steps,
        prompts_per_step=1,
        optimizer=OptimizerConfig(lr=3e-3),
        first_step=0,
    )


_CODE: Final = frozenset({".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"})
"""File names that say pickle: reading one may run what it holds."""


class ModelWeights(ModelSetting):
    """The tensors of the module: those that travel, and those on disk."""

    @pytest.fixture
    def exported(self, model: Model, module: torch.nn.Module, tmp_path: Path) -> Path:
        """A folder with the exported module, whose weights are no longer those that `build` makes."""
        disturb(module)
        folder = tmp_path / "exported"
        model.export(module, folder)
        return folder

    @pytest.fixture
    def again(self, exported: Path, reload: Reload) -> Model:
        """The model of the exported folder."""
        return reload(exported)

    def test_the_shard_map_covers_each_parameter_exactly_once(self, module: torch.nn.Module) -> None:
        """Rollout replicas get what the map names; the optimizer would step twice on memory that has two names."""
        tensors = canonical_tensors(module)
        shards = ShardMap.of_tensors(tensors)
        sent = sum(size(piece) for pieces in shards.ranks.values() for piece in pieces)
        held = sum(tensor.numel() for tensor in tensors.values())
        assert sent == held
        spans = sorted((*_span(tensor), name) for name, tensor in tensors.items() if tensor.numel())
        for (_, end, name), (start, _, other) in itertools.pairwise(spans):
            if start < end:
                fault(
                    f"{name} and {other} share memory, so the shard map covers it twice; tie parameters by assigning "
                    "one Parameter object to both places, never a view of it"
                )

    def test_the_published_tensors_are_the_whole_model(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload]
    ) -> None:
        """A rollout replica that loads them must say what the trainer says."""
        disturb(module)
        replica = model.build(seed=SEED + 1, dtype=torch.float32, device=CPU)
        places, sent = canonical_tensors(replica), canonical_tensors(module)
        if places.keys() != sent.keys():
            fault(f"two modules of one model have other tensors: {', '.join(sorted(places.keys() ^ sent.keys())[:5])}")
        for name, tensor in sent.items():
            places[name].copy_(tensor)
        if not _says_the_same(model, module, replica, payloads):
            fault(
                "a module that was given every published tensor gives other log-probs: weights lie outside its "
                "parameters and persistent buffers; register them with register_parameter or register_buffer"
            )

    def test_a_training_step_changes_every_published_parameter(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload]
    ) -> None:
        """Imitating the payloads through the trainer makes them likelier, and reaches all that is published."""
        before = copied(module)
        trainable = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        losses = imitate(model, module, payloads, steps=4)
        after = canonical_tensors(module)
        still = [name for name, tensor in after.items() if name in trainable and torch.equal(tensor, before[name])]
        if still:
            fault(f"training left {len(still)} trainable parameters as they were: {', '.join(still[:5])}")
        if not losses[-1] < losses[0]:
            fault(f"imitating the payloads did not make them likelier: losses of the steps were {losses}")

    def test_the_export_holds_every_tensor(self, module: torch.nn.Module, exported: Path) -> None:
        """Someone else's library reads the folder, and must find what was trained, bit for bit."""
        found = self.load_exported(exported)
        for name, tensor in canonical_tensors(module).items():
            if name not in found:
                fault(
                    f"the exported folder has no tensor {name}, as its public library reads it; the canonical names "
                    "are those of the public format"
                )
            if not torch.equal(found[name], tensor):
                fault(
                    f"the exported {name} is not that of the module that export() was given, which was changed since "
                    "build() as training does; write each tensor of that module as it is"
                )

    def test_the_export_holds_no_pickle(self, exported: Path) -> None:
        """Reading weights must never run code."""
        unsafe = sorted(path.name for path in exported.rglob("*") if path.suffix in _CODE)
        if unsafe:
            fault(f"export() wrote {', '.join(unsafe)}, which may hold pickles; write safetensors")

    def test_the_exported_model_is_the_same_model(
        self, model: Model, module: torch.nn.Module, again: Model, payloads: Sequence[Payload]
    ) -> None:
        """A run goes on from an export as from any checkpoint."""
        rebuilt = again.build(seed=SEED + 1, dtype=torch.float32, device=CPU)
        if name := first_difference(copied(module), copied(rebuilt)):
            fault(f"a model from the exported folder has other weights: {name}")
        if not _says_the_same(model, module, rebuilt, payloads, again):
            fault("a model from the exported folder gives other log-probs, though its weights are the same")

    def test_the_exported_model_encodes_the_same(self, model: Model, again: Model, prompts: Sequence[Prompt]) -> None:
        """The tokenizer, and whatever else planning asks, travels with the weights."""
        for prompt in prompts:
            if _bytes(again.encode(prompt)) != _bytes(model.encode(prompt)):
                fault(f"a model from the exported folder encodes {prompt.text!r} differently; export the tokenizer too")
        if again.facts() != model.facts():
            fault(f"a model from the exported folder has other facts: {again.facts()}, not {model.facts()}")


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last address of a tensor, the last excluded."""
    length = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + length * tensor.element_size()


def _says_the_same(
    model: Model, module: torch.nn.Module, other: torch.nn.Module, payloads: Sequence[Payload], by: Model | None = None
) -> bool:
    """True if two modules give the same log-probs, bit for bit."""
    with torch.no_grad():
        mine, theirs = decide_each(model, module, payloads), decide_each(by or model, other, payloads)
    return all(torch.equal(a.logprobs_N, b.logprobs_N) for a, b in zip(mine, theirs, strict=True))


def _bytes(payload: Payload) -> tuple[object, ...]:
    return payload.kind, {name: (array.shape, bytes(array.data)) for name, array in payload.arrays.items()}
