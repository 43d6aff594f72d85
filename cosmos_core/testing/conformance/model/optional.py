"""Tests of the optional protocols of a model: what it counts and records, and how prompts enter and are shown."""

from __future__ import annotations

import math

import attrs
import numpy as np
import torch

from cosmos_core.models.tokens import array_of
from cosmos_core.protocols.model import MoEModel
from cosmos_core.protocols.vision import VisionModel
from cosmos_core.testing.conformance.model.subject import Subject, expect_close, expect_refusal
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Array, Payload
from cosmos_core.weights.shards import dtype_name


class OptionalTests:
    """Tests of a model that is a `MoEModel` or a `VisionModel`."""

    def test_only_forwards_of_a_step_are_counted(self, subject: Subject) -> None:
        """The trainer zeroes the counters, sums them over processes, and acts on them after the optimizer."""
        why = "with these options the model counts nothing"
        counting: MoEModel = subject.optional(MoEModel, why, lambda model: model.counters(subject.module))
        counters = counting.counters(subject.module)
        if odd := [counter.dtype for counter in counters if counter.dtype != torch.float32]:
            fault(f"counters() gave {odd[0]}; give float32, in which they are summed over processes")
        seen = []
        for is_learned in (False, True, True):
            for counter in counting.counters(subject.module):
                counter.zero_()
            total = _total(subject, is_learned=is_learned)
            seen.append([counter.clone() for counter in counting.counters(subject.module)])
        if not all(torch.equal(first, again) for first, again in zip(seen[1], seen[2], strict=True)):
            fault("the same forwards count something else after counters() were zeroed; give the tensors, never copies")
        if any(bool(counter.any()) for counter in seen[0]):
            fault("a forward without weights_N is counted: nothing is learned from it")
        total.backward()  # type: ignore[no-untyped-call]
        trained = {name: each for name, each in subject.module.named_parameters() if each.grad is not None}
        before = {name: each.detach().clone() for name, each in trained.items()}
        metrics = counting.after_step(subject.module)
        for name, value in metrics.items():
            if not math.isfinite(value):
                fault(f"after_step() reports {name} = {value}; give finite numbers")
        if moved := [name for name, each in trained.items() if not torch.equal(each, before[name])]:
            fault(f"after_step() changed {moved[0]}, which has a gradient; leave it to the optimizer")

    def test_training_on_its_own_records_changes_nothing(self, subject: Subject) -> None:
        """With equal weights what was recorded, a row for each unit, is what would have been done."""
        why = "with these options the model records nothing"
        recording: MoEModel = subject.optional(MoEModel, why, lambda model: model.records())
        newest = recording.record(subject.module)
        for payload, batch in zip(subject.payloads, subject.alone, strict=True):
            with torch.no_grad():
                free_N = subject.decide(batch).logprobs_N
            rows = dict(newest())
            found = {name: (dtype_name(each.dtype), tuple(each.shape)) for name, each in rows.items()}
            wanted = {record.name: (record.dtype, (batch.num_units, *record.shape)) for record in recording.records()}
            if found != wanted:
                fault(f"a forward of {batch.num_units} units recorded {found}; records() declares {wanted}")
            recorded = subject.pack_alone(_with_records(payload, rows))
            with torch.no_grad():
                again_N = subject.decide(recorded).logprobs_N
            what = "with its own records, under the same weights, log-probs differ"
            expect_close(again_N, free_N, what, rtol=0, atol=subject.tolerance)

    def test_each_unit_of_a_prompt_enters_by_the_weights(self, subject: Subject) -> None:
        """An engine cuts prompts anywhere, asks again after an update, and refuses a request when it comes."""
        conditioned: VisionModel = subject.optional(VisionModel, "prompts are token ids alone")
        plain, shown = (
            [subject.model.encode(prompt) for prompt in subject.prompts if bool(prompt.media) == is_shown]
            for is_shown in (False, True)
        )
        if not shown:
            fault("the model is a `VisionModel`, and none of `prompts` shows anything; give some of them media")
        if any(conditioned.condition(payload) is not None for payload in plain):
            fault("condition() of a prompt without media gave something; give None where token ids say it all")
        other = subject.other_weights()
        for payload in shown:
            _check_entered(conditioned, payload, subject.module, other)
            for lost in payload.arrays.keys() - {"prompt"}:
                what = f"condition() took a prompt that shows something without its array {lost!r}"
                expect_refusal(what, conditioned.condition, _without(payload, lost))
        for payload in (*plain, *shown):
            strange = attrs.evolve(payload, arrays={**payload.arrays, "kit-made": payload.arrays["prompt"]})
            what = "condition() took a prompt with an array that no model knows, 'kit-made'"
            expect_refusal(what, conditioned.condition, strange)

    def test_each_image_or_video_is_shown_where_it_stands(self, subject: Subject) -> None:
        """Once, in the order of the prompt, no unit for two of them."""
        why = "no other implementation takes what its prompts show"
        shown_by = subject.optional(VisionModel, why, lambda model: model.shown is not None).shown
        if not any(prompt.media for prompt in subject.prompts):
            fault("the model has `shown`, and none of `prompts` shows anything; give some of them media")
        for prompt in subject.prompts:
            payload, end = subject.model.encode(prompt), 0
            shown, units = shown_by(payload), payload.arrays["prompt"].shape[0]
            if len(shown) != len(prompt.media):
                fault(f"shown() of a prompt with {len(prompt.media)} media gave {len(shown)}; give one for each")
            for each in shown:
                number = len(each.is_seen_U)
                if not 0 <= each.start < each.start + number <= units:
                    fault(f"shown() puts {number} units at {each.start} of a prompt of {units}; they lie in it")
                if not each.is_seen_U[-1]:
                    fault("shown() gave units of which none, or not the last, is seen; end with one that is")
                if each.start < end:
                    fault(f"shown() puts one at {each.start}, before the end of another at {end}; they share no unit")
                end = each.start + number
            for lost in payload.arrays.keys() - {"prompt"} if prompt.media else ():
                what = f"shown() took a prompt that shows something without its array {lost!r}"
                expect_refusal(what, shown_by, _without(payload, lost))


def _total(subject: Subject, *, is_learned: bool) -> torch.Tensor:
    """The log-probability of all payloads, evaluated as in a step or outside of one."""
    total = torch.zeros(())
    for batch in subject.batches:
        weights_N = torch.ones(sum(batch.num_decisions)) if is_learned else None
        total = total + subject.decide(attrs.evolve(batch, weights_N=weights_N)).logprobs_N.sum()
    return total


def _with_records(payload: Payload, recorded: dict[str, torch.Tensor]) -> Payload:
    """The payload as an engine would have made it."""
    arrays = {
        name: Array(
            dtype=dtype_name(rows.dtype),
            shape=tuple(rows.shape),
            data=rows.cpu().contiguous().view(torch.uint8).numpy().tobytes(),
        )
        for name, rows in recorded.items()
    }
    logprobs = array_of(np.zeros(payload.arrays["completion"].shape, np.float32))
    return attrs.evolve(payload, arrays={**payload.arrays, **arrays, "logprobs": logprobs})


def _without(payload: Payload, lost: str) -> Payload:
    return attrs.evolve(payload, arrays={name: each for name, each in payload.arrays.items() if name != lost})


def _check_entered(conditioned: VisionModel, payload: Payload, module: torch.nn.Module, other: torch.nn.Module) -> None:
    units, conditioning = payload.arrays["prompt"].shape[0], conditioned.condition(payload)
    if conditioning is None:
        fault("condition() of a prompt that shows something gave None; it would be computed as text")
    if conditioning.positions.shape[-1] != units or conditioning.positions.dtype != torch.int64:
        fault(f"positions of {units} units are {list(conditioning.positions.shape)}; give int64 [..., {units}]")
    with torch.no_grad():
        one, again, changed = (conditioned.enter(each, conditioning) for each in (module, module, other))
    if odd := {name: list(rows.shape) for name, rows in one.items() if len(rows) != units}:
        fault(f"enter() of {units} units gave {odd}; give a row for each unit")
    if any(not torch.equal(one[name], again[name]) for name in one):
        fault("enter() gave something else for the same weights and prompt")
    if all(torch.equal(one[name], changed[name]) for name in one):
        fault("enter() gave the same for other weights; keep nothing from one call to the next")
