"""Decisions: the log-probabilities are the model's own, whatever else is packed.

Shape legend: N decisions of a micro-batch, or of one payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest
import torch

from cosmos_core.protocols import Decided, Model
from cosmos_core.testing.conformance.model.evaluation import ROOM, decide_each, pack_alone, splits
from cosmos_core.testing.conformance.model.setting import CPU, SEED, ModelSetting
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Payload

_LEAST_SPREAD: Final = 0.25
"""Standard deviation of the log-probs, in nats: below it a model says much the same of everything."""
_BF16_ERROR: Final = 0.1
"""Mean difference, in nats, that computing in bfloat16 may make to a model of some layers."""


class ModelDecisions(ModelSetting):
    """`decide` against a reference, and against itself."""

    @pytest.fixture
    def alone(self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload]) -> list[torch.Tensor]:
        """Log-probs of each payload in a micro-batch of its own."""
        with torch.no_grad():
            return [
                model.decide(module, pack_alone(model, payload), temperature=1.0).logprobs_N for payload in payloads
            ]

    def test_log_probs_equal_the_reference(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload]
    ) -> None:
        """Ratios of the loss are between these numbers and the engine's; both must be the model's."""
        for temperature in self.temperatures:
            expected = [each.logprobs_N for each in self.reference(model, module, payloads, temperature=temperature)]
            with torch.no_grad():
                found = decide_each(model, module, payloads, temperature=temperature)
            self._compare(
                [each.logprobs_N for each in found],
                expected,
                f"log-probs at temperature {temperature:g} are not those of the reference",
            )

    def test_a_mistake_would_show_in_this_model(self, alone: list[torch.Tensor]) -> None:
        """A model that says much the same of everything would pass whatever its plugin did."""
        spread = float(torch.cat(alone).std())
        if not spread >= _LEAST_SPREAD:
            fault(
                f"the log-probs of all decisions are nearly equal (standard deviation {spread:.2g}), so the kit could "
                f"not see a mistake; test a model with larger weights, such as initializer_range = 0.2 in its config"
            )

    def test_log_probs_do_not_depend_on_what_else_is_packed(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload], alone: list[torch.Tensor]
    ) -> None:
        """Packed sequences never see one another."""
        with torch.no_grad():
            together = [each.logprobs_N for each in decide_each(model, module, payloads)]
        self._compare(together, alone, "log-probs change with what else is packed: sequences see one another")

    def test_log_probs_do_not_depend_on_order_or_budget(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload], alone: list[torch.Tensor]
    ) -> None:
        """`decide` answers in the order of `batch.sequences`, however the payloads were split."""
        longest = max(payloads, key=lambda payload: pack_alone(model, payload).num_units)
        size = pack_alone(model, longest).num_units
        halves = (size // 2,) if splits(model, longest) else ()
        for budget in (*halves, size + 1, ROOM):
            with torch.no_grad():
                found = decide_each(model, module, list(reversed(payloads)), budget=budget)
            self._compare(
                [each.logprobs_N for each in reversed(found)],
                alone,
                f"log-probs change with the order of the payloads (budget of {budget} units): "
                "give them in the order of batch.sequences",
            )

    def test_the_same_micro_batch_gives_the_same_bits(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload]
    ) -> None:
        """Nothing is drawn in a forward; dropout would make log-probs incomparable."""
        with torch.no_grad():
            first, second = (decide_each(model, module, payloads) for _ in range(2))
        if any(not torch.equal(a.logprobs_N, b.logprobs_N) for a, b in zip(first, second, strict=True)):
            fault("decide() gives other log-probs the second time; build() must leave no dropout on (module.eval())")

    def test_log_probs_are_float32_whatever_the_precision(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload]
    ) -> None:
        """A trainer computes in bfloat16 by autocast, a rollout replica holds bfloat16 weights."""
        with torch.no_grad():
            exact = decide_each(model, module, payloads)
            with torch.autocast("cpu", torch.bfloat16):
                trained = decide_each(model, module, payloads)
            half = model.build(seed=SEED, dtype=torch.bfloat16, device=CPU)
            held = decide_each(model, half, payloads)
        for what, found in (("float32", exact), ("bfloat16 autocast", trained), ("bfloat16 weights", held)):
            _check_values(found, f"with {what}")
            values_N = _joined(found)
            if bool((values_N.bfloat16().float() == values_N).all()):
                fault(
                    f"with {what} every log-prob is a bfloat16 number: they were rounded, by some 0.4% each; compute "
                    "the log-softmax in float32 and give what it gives"
                )
            error = float((values_N - _joined(exact)).abs().mean())
            if not error <= _BF16_ERROR:
                fault(
                    f"with {what} log-probs are off by {error:.2g} nats on average (allowed {_BF16_ERROR}); "
                    "compute norms and the log-softmax in float32"
                )

    def test_the_entropy_is_given_where_asked_for(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload]
    ) -> None:
        """It costs a pass over the distribution, and only some algorithms use it."""
        batch = model.pack(payloads, budget=ROOM)[0]
        plain = model.decide(module, batch, temperature=1.0)
        asked = model.decide(module, batch, temperature=1.0, with_entropy=True)
        if plain.entropy_N is not None:
            fault("decide(with_entropy=False) gave an entropy; give None, algorithms rely on it")
        if asked.entropy_N is None or asked.entropy_N.shape != asked.logprobs_N.shape:
            shape = None if asked.entropy_N is None else tuple(asked.entropy_N.shape)
            fault(f"decide(with_entropy=True) gave entropies {shape} for {len(asked.logprobs_N)} decisions")
        if asked.entropy_N.requires_grad or asked.entropy_N.dtype != torch.float32:
            fault("the entropy must be detached and float32: it is a measure, and never part of the graph")
        if not torch.equal(plain.logprobs_N, asked.logprobs_N):
            fault("log-probs change when the entropy is asked for")

    def test_the_entropy_equals_the_reference(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload]
    ) -> None:
        """Of the distribution that the decision was drawn from: after the temperature."""
        for temperature in self.temperatures:
            expected = [each.entropy_N for each in self.reference(model, module, payloads, temperature=temperature)]
            given = [entropy_N for entropy_N in expected if entropy_N is not None]
            if len(given) < len(expected):
                pytest.skip("not given: the reference has no entropies")
            with torch.no_grad():
                found = decide_each(model, module, payloads, temperature=temperature, with_entropy=True)
            entropies = [each.entropy_N for each in found if each.entropy_N is not None]
            self._compare(entropies, given, f"entropies at temperature {temperature:g} are not those of the reference")

    def _compare(self, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], what: str) -> None:
        """Fault with the payload and decision that is furthest off, if any is off by more than `tolerance`."""
        worst = (0.0, "")
        for index, (mine_N, theirs_N) in enumerate(zip(found, expected, strict=True)):
            if mine_N.shape != theirs_N.shape:
                fault(f"{what}: payload {index} has {len(mine_N)} decisions, expected {len(theirs_N)}")
            if not len(mine_N):
                continue
            # `not <=` and this place keep NaN from passing.
            excess_N = ((mine_N - theirs_N).abs() - self.tolerance * theirs_N.abs()).nan_to_num(nan=float("inf"))
            place = int(excess_N.argmax())
            if float(excess_N[place]) > max(self.tolerance, worst[0]):
                values = f"{float(mine_N[place]):.6g}, expected {float(theirs_N[place]):.6g}"
                worst = (float(excess_N[place]), f"payload {index}, decision {place}: {values}")
        if worst[1]:
            fault(f"{what}; {worst[1]} (tolerance {self.tolerance:g})")


def _check_values(found: Sequence[Decided], when: str) -> None:
    for index, each in enumerate(found):
        if each.logprobs_N.dtype != torch.float32:
            fault(f"{when}, decide() gave log-probs of {each.logprobs_N.dtype}; the loss needs torch.float32")
        if not bool(each.logprobs_N.isfinite().all()):
            fault(f"{when}, log-probs of payload {index} are not finite: {each.logprobs_N.tolist()}")


def _joined(found: Sequence[Decided]) -> torch.Tensor:
    return torch.cat([each.logprobs_N for each in found])
