"""Sequences that lie in several micro-batches are priced as if they lay in one."""

import itertools
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch

from cosmos_core.errors import TrainingError
from cosmos_core.policy.batches.batch import Counts, Share, TrainSequence
from cosmos_core.policy.processes.group import solo
from cosmos_core.policy.training import old_logprobs
from cosmos_core.policy.training.metrics import Stopwatch
from cosmos_core.policy.training.microbatch import Piece, decision_weights, know
from cosmos_core.protocols import Aggregation, AlgorithmCapabilities, Loss, NoOptions, PlainAlgorithm
from cosmos_core.protocols.algorithm import Estimate, Taken
from cosmos_core.protocols.frozen import Blend, Divergence
from cosmos_core.protocols.model import Span
from cosmos_core.protocols.world import WorldModel
from cosmos_core.testing.conformance.algorithm.batch import draw, laid
from cosmos_core.types import Array, Prompt
from tests.unit.policy.training.test_frozen import frozen_model
from tests.world_model import World, walked

WORLD = World(NoOptions(), SimpleNamespace(path=None))
LENGTHS = (5, 1, 3, 4)


def generated():
    prompts = [WORLD.encode(Prompt(text=text)) for text in ("red", "blue", "a green ball", "rain")]
    return [
        TrainSequence(payload=walked(prompt, number, 10 * place), advantage=0.5 - place, place=place)
        for place, (prompt, number) in enumerate(zip(prompts, LENGTHS, strict=True))
    ]


def imitated():
    rows = [Prompt(text=text, demonstration=text[::-1]) for text in ("red", "blue", "a green ball", "rain")]
    return [
        TrainSequence(payload=WORLD.noised(WORLD.encode_demonstration(row), place), advantage=1.0, place=place)
        for place, row in enumerate(rows)
    ]


def counts(sequences):
    decisions = sum(each.payload.arrays["times"].shape[0] for each in sequences)
    return Counts(sequences=len(sequences), decisions=decisions, trained=len(sequences))


def gradient(trainer, sequences):
    """Of a step, with its metrics."""
    held = []
    apply = trainer._apply
    trainer._apply = lambda *given: held.append(trainer._gradients.flat.clone()) or apply(*given)
    totals = counts(sequences)
    applied = trainer.train(Share(sequences=tuple(sequences), counts=totals), totals, solo(), Stopwatch(trainer.device))
    return held[0], applied.meter.report()


def expected(aggregation, sequences, price):
    """The gradient in float64, each sequence in one piece: `price` gives the loss of each of its decisions."""
    module = WORLD.build(seed=0, dtype=torch.float64, device=torch.device("cpu"))
    total = torch.zeros((), dtype=torch.float64)
    for sequence in sequences:
        (batch,) = WORLD.pack([sequence.payload], budget=99)
        inputs = {name: each.double() for name, each in batch.inputs.items()}
        logprobs_n = exact(module, inputs)
        loss_n = price(sequence, logprobs_n)
        match aggregation:
            case Aggregation.TOKEN_MEAN:
                total = total + loss_n.sum() / counts(sequences).decisions
            case Aggregation.SEQUENCE_MEAN_TOKEN_MEAN:
                total = total + loss_n.mean() / len(sequences)
            case Aggregation.SEQUENCE_MEAN_TOKEN_SUM:
                total = total + loss_n.sum() / (10 * len(sequences))
    total.backward()
    return float(total.detach()), torch.cat([parameter.grad.flatten() for parameter in module.parameters()])


def exact(module, inputs):
    """Gaussian log-probs in float64, written anew."""
    places = inputs["states"].movedim(1, -1)
    places = torch.cat([places, places.mean(1, keepdim=True).expand_as(places)], -1)
    clock = torch.stack([inputs["times"], inputs["times"].square()], -1)
    beside = module.clock(clock) + module.text(inputs["texts"])
    v = module.out(torch.tanh(module.into(places) + beside[:, None, None, None])).movedim(-1, 1)
    a, b, std = (each[:, None, None, None, None] for each in inputs["steps"].unbind(1))
    return torch.distributions.Normal(a * inputs["states"] + b * v, std).log_prob(inputs["aims"]).flatten(1).mean(1)


def off_policy(sequence, logprobs_n):
    behaviour_n = torch.frombuffer(bytearray(sequence.payload.arrays["logprobs"].data), dtype=torch.float32).double()
    return -sequence.advantage * (0.1 * (logprobs_n - behaviour_n)).exp()


def off_policy_loss(decisions):
    ratio_N = (0.1 * (decisions.logprobs_N - decisions.behaviour_logprobs_N)).exp()
    return Loss(loss_N=-decisions.advantages_N * ratio_N)


def test_a_step_is_that_of_whole_sequences_in_float64(kit):
    for budget in [1, 2, 3, 99]:
        for aggregation in list(Aggregation):
            algorithm = kit.Reinforce(aggregation=aggregation, loss_of=off_policy_loss)
            trainer = kit.make_trainer(WORLD, algorithm, micro_batch_units=budget)
            flat, metrics = gradient(trainer, generated())
            total, whole = expected(aggregation, generated(), off_policy)
            assert metrics["loss"] == pytest.approx(total, abs=1e-6, rel=1e-6)
            torch.testing.assert_close(flat.double(), whole, rtol=1e-6, atol=1e-6)


def test_what_is_known_is_cut_where_the_sequence_is():
    sequences = generated()[:1]
    algorithm = SimpleNamespace(aggregation=Aggregation.SEQUENCE_MEAN_TOKEN_MEAN, constant_length=1)
    batches = WORLD.pack([sequences[0].payload], budget=2)
    known = [know(algorithm, batch, sequences, counts(sequences)) for batch in batches]
    logprobs = torch.frombuffer(bytearray(sequences[0].payload.arrays["logprobs"].data), dtype=torch.float32)
    assert torch.equal(torch.cat([each.behaviour_logprobs_N for each in known]), logprobs)
    assert [each.num_sequences for each in known] == [1, 1, 1]
    torch.testing.assert_close(torch.cat([each.weights_N for each in known]), torch.full((5,), 1 / 5))


@attrs.frozen(kw_only=True)
class Settling(PlainAlgorithm):
    """Advantages that rise along a sequence, from what all of its decisions come to."""

    aggregation: Aggregation = Aggregation.SEQUENCE_MEAN_TOKEN_MEAN
    constant_length: int = 1
    old_logprobs: str = "recompute"
    needs_entropy: bool = False
    skips_zero_advantage: bool = False
    consults: dict = attrs.field(factory=lambda: {"reference": None})
    seen: list = attrs.field(factory=list)

    def admit(self, group):
        return None

    def advantages(self, groups):
        raise AssertionError

    def summarise(self, taken):
        self.seen.append(taken)
        return [float(taken.logprobs_n.sum() - taken.frozen_n["reference"].sum())]

    def settle(self, batch):
        total = sum(each for (each,) in batch.values())

        def estimate(taken):
            n = len(taken.logprobs_n)
            rising_n = torch.arange(1, n + 1) / n
            return Estimate(
                advantages_n=rising_n * batch[taken.place][0] + total,
                targets_n=rising_n * taken.advantage,
                metrics={"length": float(n)},
            )

        return estimate

    def loss(self, decisions):
        return Loss(loss_N=-decisions.advantages_N * decisions.logprobs_N + decisions.targets_N * decisions.logprobs_N)


def test_estimates_are_of_whole_sequences_however_they_lie(kit):
    found = []
    for budget in (1, 2, 99):
        algorithm = Settling()
        frozen = {"reference": frozen_model(WORLD, seed=7)}
        trainer = kit.make_trainer(WORLD, algorithm, frozen=frozen, micro_batch_units=budget)
        flat, metrics = gradient(trainer, generated())
        assert sorted(len(each.logprobs_n) for each in algorithm.seen) == sorted(LENGTHS)
        assert metrics["length"] == pytest.approx(sum(LENGTHS) / len(LENGTHS))
        found.append((flat, metrics["loss"]))
    for flat, loss in found[:2]:
        assert loss == pytest.approx(found[2][1], rel=1e-6)
        torch.testing.assert_close(flat, found[2][0], rtol=1e-6, atol=1e-6)


def test_a_frozen_model_that_splits_otherwise_is_refused(kit):
    class Other(World):
        def pack(self, payloads, *, budget, multiple=1, is_uniform=False):
            batches = super().pack(payloads, budget=budget, multiple=multiple, is_uniform=is_uniform)
            shifted = [attrs.evolve(span, first=span.first + 1) for span in batches[0].spans]
            return [attrs.evolve(batches[0], spans=tuple(shifted)), *batches[1:]]

    other = Other(NoOptions(), SimpleNamespace(path=None))
    trainer = kit.make_trainer(
        WORLD, Settling(), frozen={"reference": frozen_model(other, seed=7)}, micro_batch_units=2
    )
    with pytest.raises(TrainingError, match=r"its model packs sequences \(0,\) of \(2,\) decisions from \(1,\) on"):
        gradient(trainer, generated())


def comparing(kit, comparison):
    @attrs.frozen(kw_only=True)
    class Comparing(kit.Reinforce):
        skips_zero_advantage: bool = False
        consults: dict = attrs.field(factory=lambda: {"teacher": comparison})

        def loss(self, decisions):
            output = decisions.frozen["teacher"]
            self.seen.append(output)
            if isinstance(comparison, Divergence):
                return Loss(loss_N=output.divergence_N)
            return Loss(loss_N=output.blended.squared_NK.mean(1) / output.blended.absolute_NK.mean(1))

    return Comparing()


def test_comparisons_are_answered_however_sequences_lie(kit):
    for comparison in [Divergence(kind="forward-kl"), Blend(shares=(0.5, 1.5))]:
        sequences = generated() if isinstance(comparison, Divergence) else imitated()
        found = []
        for budget in (1, 4, 99):
            algorithm = comparing(kit, comparison)
            frozen = {"teacher": frozen_model(WORLD, seed=7, role="teacher")}
            trainer = kit.make_trainer(WORLD, algorithm, frozen=frozen, micro_batch_units=budget)
            found.append(gradient(trainer, sequences))
            output = algorithm.seen[0]
            assert (output.divergence_N is None) == isinstance(comparison, Blend)
            assert (output.blended is None) == isinstance(comparison, Divergence)
        assert found[0][0].norm() > 1e-3
        for (flat, metrics), (other, others) in itertools.pairwise(found):
            assert metrics["loss"] == pytest.approx(others["loss"], rel=1e-6)
            torch.testing.assert_close(flat, other, rtol=1e-6, atol=1e-6)


def test_the_model_of_these_tests_draws_its_points():
    assert isinstance(WORLD, WorldModel)


TOTALS = Counts(sequences=5, decisions=40, trained=4)


def test_weights_by_hand():
    assert decision_weights(Aggregation.TOKEN_MEAN, 0, [2, 8], TOTALS) == [1 / 40, 1 / 40]
    assert decision_weights(Aggregation.SEQUENCE_MEAN_TOKEN_MEAN, 0, [2, 8], TOTALS) == [1 / 10, 1 / 40]
    assert decision_weights(Aggregation.SEQUENCE_MEAN_TOKEN_SUM, 20, [2, 8], TOTALS) == [1 / 100, 1 / 100]


def test_an_empty_batch_divides_by_nothing():
    for aggregation in list(Aggregation):
        assert decision_weights(aggregation, 10, [], Counts()) == []


def test_what_is_known_follows_the_order_of_the_micro_batch(model, kit):
    payloads = [
        kit.payload([1], [2, 3], version=4, logprobs=[-0.5, -1.0]),
        kit.payload([1, 2], [5, 6, 7], version=6, logprobs=[-2.0, -3.0, -4.0]),
    ]
    sequences = [TrainSequence(payload=p, advantage=a) for p, a in zip(payloads, (0.5, -1.0), strict=True)]
    (batch,) = model.pack(payloads, budget=20)
    assert batch.sequences == (1, 0)
    known = know(kit.Reinforce(), batch, sequences, kit.counts_of(sequences))
    assert known.behaviour_logprobs_N.tolist() == [-2.0, -3.0, -4.0, -0.5, -1.0]
    assert known.versions_N.tolist() == [6, 6, 6, 4, 4]
    assert known.advantages_N.tolist() == [-1.0, -1.0, -1.0, 0.5, 0.5]
    assert known.sequence_N.tolist() == [0, 0, 0, 1, 1]
    torch.testing.assert_close(known.weights_N, torch.full((5,), 0.2))
    assert known.num_sequences == 2
    assert known.has_behaviour


def test_a_sequence_without_decisions_counts_as_one(model, kit):
    sequences = [TrainSequence(payload=kit.payload([1, 2, 3], c), advantage=1.0) for c in ([4, 5], [])]
    (batch,) = model.pack([sequence.payload for sequence in sequences], budget=20)
    assert know(kit.Reinforce(), batch, sequences, kit.counts_of(sequences)).num_sequences == 2


def test_squared_errors_of_regressions_are_no_log_probs_to_compare_with(kit):
    """What an engine gives for them would make a divergence of policies that is none."""
    world = World(NoOptions(), SimpleNamespace(path=None))
    sample = world.noised(world.encode_demonstration(Prompt(text="x", demonstration="y")), 0)
    number = sample.arrays["times"].shape[0]
    logprobs = Array(dtype="float32", shape=(number,), data=np.full(number, -2.0, np.float32).tobytes())
    learned = attrs.evolve(sample, arrays={**sample.arrays, "logprobs": logprobs})
    walk = walked(world.encode(Prompt(text="x")), 2, 1)
    for payload, expected in ((learned, False), (walk, True)):
        sequences = [TrainSequence(payload=payload, advantage=1.0)]
        (batch,) = world.pack([payload], budget=99)
        known = know(kit.Reinforce(), batch, sequences, Counts(sequences=1, decisions=9, trained=1))
        assert known.has_behaviour == expected
        assert (known.behaviour_logprobs_N != 0).all()


def test_documents_of_a_sample_are_joined_in_its_order_whatever_order_they_are_packed_in(monkeypatch):
    def taken(first, number):
        piece = Piece(sequence=0, number=number, span=Span(first=first, total=10))
        logprobs_n = torch.arange(first, first + number, dtype=torch.float32)
        return piece, Taken(place=0, advantage=1.0, logprobs_n=logprobs_n, values_n=-logprobs_n)

    monkeypatch.setattr(old_logprobs, "_pieces_taken", lambda *given: [taken(4, 6), taken(0, 4)])
    (joined,) = old_logprobs._taken(None, SimpleNamespace(prepared=SimpleNamespace(num_real=1))).values()
    assert joined.logprobs_n.tolist() == list(range(10))
    assert joined.values_n.tolist() == [-each for each in range(10)]


def test_an_algorithm_that_estimates_is_told_of_the_turns_of_a_dialogue():
    batch, algorithm = draw(AlgorithmCapabilities()), PlainAlgorithm()
    taken = old_logprobs._taken(algorithm, laid(algorithm, batch, [batch.whole]))
    assert [[(turn.num_decisions, turn.reward) for turn in each.turns] for each in taken.values()] == [
        [(1, 0.25), (length - 1, 0.0)] if length > 1 else [] for length in batch.lengths
    ]
