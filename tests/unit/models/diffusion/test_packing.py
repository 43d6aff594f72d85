"""Decisions of either kind in micro-batches, in order; times and noise of regressions."""

import math
import weakref

import pytest
import torch

from cosmos_core.errors import DataError
from cosmos_core.models.diffusion.arrays import payload_of, with_tensors
from cosmos_core.models.diffusion.options import DiffusionOptions
from cosmos_core.models.diffusion.packing import LEAST, draw_times, generator_of, noise_of, pack
from cosmos_core.protocols.model import Span
from cosmos_core.types import Payload

SHAPE = (2, 3, 2, 2)


def transitions(number, **more):
    states = torch.arange(number + 1.0)[:, None, None, None, None].expand(-1, *SHAPE)
    return payload_of(
        {
            "text": torch.ones(1, 4),
            "states": states,
            "places": torch.tensor([[i, i + 1] for i in range(number)], dtype=torch.int32).view(-1, 2),
            "times": torch.linspace(1.0, 0.1, number),
            "steps": torch.tensor([[1.0, -0.1, 0.5]]).expand(number, 3),
            **more,
        }
    )


def regressions(number, seed=5, **more):
    tensors = {"sample": torch.full(SHAPE, 3.0), "times": torch.linspace(0.2, 0.8, number)}
    return payload_of({"text": torch.ones(1, 4), "noise_seed": torch.tensor(seed), **tensors, **more})


def packed(payloads, budget):
    return pack(payloads, SHAPE, lambda _: {"text": torch.ones(2, 4)}, budget=budget, neutral_guidance=1.0)


def test_sequences_are_cut_where_a_micro_batch_is_full():
    batches = packed([transitions(3), regressions(4), transitions(1)], 3)
    assert [each.sequences for each in batches] == [(0,), (1,), (1, 2)]
    assert [each.num_decisions for each in batches] == [(3,), (3,), (1, 1)]
    assert [each.num_units for each in batches] == [3, 3, 2]
    assert batches[2].spans == (Span(first=3, total=4), Span(first=0, total=1))
    assert batches[2].inputs["rows"].tolist() == [0, 1]
    assert batches[2].inputs["condition.text"].shape == (2, 2, 4)


def test_what_a_decision_starts_from_and_is_compared_with():
    (batch,) = packed([transitions(2), regressions(2)], 9)
    inputs = batch.inputs
    assert inputs["is_regression"].tolist() == [False, False, True, True]
    assert inputs["latents"][:2, 0, 0, 0, 0].tolist() == [0.0, 1.0]
    assert inputs["targets"][:2, 0, 0, 0, 0].tolist() == [1.0, 2.0]
    noise, time = noise_of(5, 1, SHAPE), 0.8
    torch.testing.assert_close(inputs["latents"][3], (1 - time) * torch.full(SHAPE, 3.0) + time * noise)
    torch.testing.assert_close(inputs["targets"][3], noise - 3.0)

    offsets = torch.full((2, *SHAPE), 0.25)
    (batch,) = packed([transitions(2, offsets=offsets)], 9)
    assert batch.inputs["targets"][:, 0, 0, 0, 0].tolist() == [0.75, 1.75]

    given = torch.tensor([True, False, False])
    (batch,) = packed([regressions(2, is_given=given, given=torch.zeros(SHAPE))], 9)
    assert (batch.inputs["latents"][:, :, 0] == 3.0).all()
    assert not (batch.inputs["latents"][:, :, 1:] == 3.0).any()
    assert batch.inputs["is_given"].tolist() == [given.tolist()] * 2

    (batch,) = packed([transitions(1, guidance=torch.tensor(4.0)), regressions(1)], 9)
    assert batch.inputs["guidance"].tolist() == [4.0, 1.0]


def test_a_sequence_without_decisions_is_packed_once():
    batches = packed([transitions(0), transitions(2)], 2)
    assert [each.sequences for each in batches] == [(0, 1)]
    assert batches[0].num_decisions == (0, 2)
    (alone,) = packed([transitions(0)], 2)
    assert alone.inputs["latents"].shape == (0, *SHAPE)


def test_what_cannot_be_evaluated_is_refused():
    for payload, said in [
        (Payload(kind="tokens", arrays={}), "kind 'tokens'"),
        (payload_of({"text": torch.ones(1, 4)}), "without the array 'times'"),
        (payload_of({"times": torch.tensor([0.5])}), "neither `states` .transitions. nor `noise_seed`"),
        (with_tensors(transitions(2), {"times": torch.tensor([0.5, 1.5])}), "times from 0.5 to 1.5"),
        (with_tensors(transitions(2), {"places": torch.tensor([[0, 1], [1, 3]], dtype=torch.int32)}), "of 3 states"),
        (with_tensors(transitions(1), {"steps": torch.tensor([[1.0, -0.1, 0.0]])}), "without noise"),
        (with_tensors(regressions(1), {"sample": torch.zeros(2, 3, 2, 3)}), r"float32 \[2, 3, 2, 3\], and must be"),
        (with_tensors(regressions(1), {"times": torch.tensor([0.5]).double()}), "is float64"),
    ]:
        with pytest.raises(DataError, match=said):
            packed([payload], 9)

    with pytest.raises(DataError, match="micro_batch_units"):
        packed([transitions(1)], 0)


def test_what_conditions_is_held_once_for_each_payload_however_often_it_is_split():
    asked = []

    def conditioning(payload):
        asked.append(payload)
        return {"text": torch.full((2, 4), float(len(asked)))}

    payloads = [transitions(3), regressions(4)]
    batches = pack(payloads, SHAPE, conditioning, budget=1, neutral_guidance=1.0)
    texts = [batch.inputs["condition.text"] for batch in batches]
    assert asked == payloads
    assert [float(text[0, 0, 0]) for text in texts] == [1.0] * 3 + [2.0] * 4
    assert len({text.untyped_storage().data_ptr() for text in texts}) == 2


def test_what_conditions_a_group_is_held_once():
    asked = []

    def conditioning(payload):
        asked.append(payload)
        return {"text": torch.ones(2, 4)}

    first = transitions(1)
    group = [
        first,
        with_tensors(first, {"states": torch.ones(2, *SHAPE)}),
        with_tensors(first, {"text": torch.ones(1, 4)}),
    ]
    (batch,) = pack(group, SHAPE, conditioning, budget=3, neutral_guidance=1.0)
    assert asked == [first, group[2]], "that of an array of its own is its own, though it is alike"
    assert batch.inputs["condition.text"].shape == (3, 2, 4)
    (batch,) = pack(group[:2], SHAPE, conditioning, budget=3, neutral_guidance=1.0)
    assert batch.inputs["condition.text"].stride(0) == 0, "a view, and no copy for each"


def test_a_micro_batch_is_laid_out_when_asked_for_and_let_go_when_another_is():
    first, second = packed([transitions(2)], 1)
    latents = weakref.ref(first.inputs["latents"])
    assert latents() is first.inputs["latents"]
    assert second.inputs["latents"].flatten()[0] == 1.0
    assert latents() is None
    assert first.inputs["latents"].flatten()[0] == 0.0

    (batch,) = packed([transitions(2)], 2)
    with torch.inference_mode():
        assert batch.inputs["latents"].shape == (2, *SHAPE)
    assert not any(tensor.is_inference() for tensor in batch.inputs.values())


def test_what_only_some_are_given_is_zero_for_the_others_and_absent_where_none_are():
    def conditioning(payload):
        return {"given": torch.ones(SHAPE)} if "given" in payload.arrays else {}

    payloads = [transitions(1), transitions(1, given=torch.ones(SHAPE)), transitions(1)]
    (batch,) = pack(payloads, SHAPE, conditioning, budget=3, neutral_guidance=1.0)
    assert batch.inputs["condition.given"].flatten(1).mean(1).tolist() == [0.0, 1.0, 0.0]
    (batch,) = pack(payloads[::2], SHAPE, conditioning, budget=3, neutral_guidance=1.0)
    assert "condition.given" not in batch.inputs


def drawn(law, *, mean=0.0, std=1.0, shift=1.0, number=20_000):
    options = DiffusionOptions(times=law, times_mean=mean, times_std=std, times_shift=shift)
    return draw_times(options, number, generator_of(3, 0)).double()


def test_logit_normal_times_have_normal_logits():
    logits = torch.logit(drawn("logit-normal", mean=0.5, std=0.8))
    assert float(logits.mean()) == pytest.approx(0.5, abs=0.02)
    assert float(logits.std()) == pytest.approx(0.8, abs=0.02)


def test_edm_times_are_those_of_log_normal_noise_levels():
    times = drawn("edm", mean=-1.2, std=1.2)
    levels = (times / (1 - times)).log()
    assert float(levels.mean()) == pytest.approx(-1.2, abs=0.03)
    assert float(levels.std()) == pytest.approx(1.2, abs=0.03)


def test_uniform_times_are_shifted_towards_noise():
    times = drawn("uniform", shift=3.0)
    # t' > 3/4 where t > 1/2.
    assert float((times > 0.75).double().mean()) == pytest.approx(0.5, abs=0.02)
    assert float(drawn("uniform").mean()) == pytest.approx(0.5, abs=0.01)


def test_times_keep_away_from_the_ends():
    times = drawn("logit-normal", std=40.0)
    assert float(times.min()) == pytest.approx(LEAST)
    assert float(times.max()) == pytest.approx(1 - LEAST)


def test_noise_is_drawn_of_two_numbers_alone():
    torch.manual_seed(1)
    first = noise_of(7, 2, (3, 50))
    torch.manual_seed(2)
    assert torch.equal(first, noise_of(7, 2, (3, 50)))
    for other in (noise_of(7, 3, (3, 50)), noise_of(8, 2, (3, 50)), noise_of(2, 7, (3, 50))):
        correlation = float((first * other).mean())
        assert abs(correlation) < 4 / math.sqrt(150)
