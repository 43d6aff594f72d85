import math

import attrs
import numpy as np
import pytest
import torch

from cosmos_core.config.schema import OptimizerConfig, ParallelConfig, PolicyConfig
from cosmos_core.errors import TrainingError
from cosmos_core.models import tokens_payload
from cosmos_core.policy.batches.batch import Counts, Share, TrainSequence
from cosmos_core.policy.processes.group import GradientGroupError, solo
from cosmos_core.policy.processes.world import single_world
from cosmos_core.policy.training.metrics import Stopwatch
from cosmos_core.policy.training.trainer import Trainer
from cosmos_core.protocols import Aggregation, Loss


def train(trainer, sequences, totals):
    return trainer.train(Share(sequences=tuple(sequences), counts=totals), totals, solo(), Stopwatch(trainer.device))


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.state().items()}


def gradient(trainer, sequences, totals):
    """The gradient that a step would apply."""
    held = []
    apply = trainer._apply
    trainer._apply = lambda *given: held.append(trainer._gradients.flat.clone()) or apply(*given)
    applied = train(trainer, sequences, totals)
    return held[0], applied.meter.report()


def check_neither_loss_nor_gradient_depends_on_the_micro_batches(model, kit, aggregation, old_logprobs):
    def ratio_loss(decisions):
        old = decisions.old_logprobs_N
        reference = torch.zeros(()) if old is None else old
        return Loss(loss_N=-decisions.advantages_N * (decisions.logprobs_N - reference).exp())

    sequences = kit.random_sequences(12)
    totals = kit.counts_of(sequences)
    results = []
    for budget in (20, 57, 1000):
        algorithm = kit.Reinforce(aggregation=aggregation, old_logprobs=old_logprobs, loss_of=ratio_loss)
        trainer = kit.make_trainer(model, algorithm, micro_batch_units=budget)
        results.append((*gradient(trainer, sequences, totals), len(algorithm.seen)))
    assert results[0][-1] > results[-1][-1] == 1
    for flat, metrics, _ in results[:-1]:
        torch.testing.assert_close(flat, results[-1][0], atol=1e-6, rtol=1e-6)
        assert metrics["loss"] == pytest.approx(results[-1][1]["loss"], abs=1e-6)


def test_neither_loss_nor_gradient_depends_on_the_micro_batches(model, kit):
    for old_logprobs in ["none", "behaviour", "recompute"]:
        for aggregation in list(Aggregation):
            check_neither_loss_nor_gradient_depends_on_the_micro_batches(model, kit, aggregation, old_logprobs)


def test_shares_add_up_to_the_whole_batch(model, kit):
    sequences = kit.random_sequences(9)
    totals = kit.counts_of(sequences)
    whole, _ = gradient(kit.make_trainer(model), sequences, totals)
    parts = [gradient(kit.make_trainer(model), share, totals)[0] for share in (sequences[:2], sequences[2:])]
    torch.testing.assert_close(sum(parts), whole, atol=1e-6, rtol=1e-6)


def test_the_loss_is_the_weighted_mean_by_hand(model, kit):
    sequences = [
        TrainSequence(payload=kit.payload([1, 2], [3, 4]), advantage=1.0),
        TrainSequence(payload=kit.payload([5], [6, 7, 8]), advantage=-2.0),
    ]
    trainer = kit.make_trainer(model)
    expected = 0.0
    trainer.module.set_attn_implementation("sdpa")
    for ids, first, advantage in (([1, 2, 3, 4], 2, 1.0), ([5, 6, 7, 8], 1, -2.0)):
        logits = trainer.module(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected -= advantage * sum(logits[i - 1, ids[i]].item() for i in range(first, 4)) / 5
    trainer.module.set_attn_implementation("cosmos_packed")
    metrics = train(trainer, sequences, kit.counts_of(sequences)).meter.report()
    assert metrics["loss"] == pytest.approx(expected, abs=1e-5)
    assert metrics["advantage"] == pytest.approx((2 * 1.0 - 3 * 2.0) / 5)


def test_gradients_of_a_step_that_broke_off_are_forgotten(model, kit):
    sequences = kit.random_sequences(4)
    totals = kit.counts_of(sequences)
    clean, _ = gradient(kit.make_trainer(model), sequences, totals)
    trainer = kit.make_trainer(model)
    broken = solo()

    def fail(tensor):
        raise GradientGroupError("gone")

    broken.sum = fail
    with pytest.raises(GradientGroupError):
        trainer.train(Share(sequences=tuple(sequences), counts=totals), totals, broken, Stopwatch(trainer.device))
    assert trainer.step == 0
    assert torch.equal(gradient(trainer, sequences, totals)[0], clean)


def test_skipping_zero_advantages_changes_nothing(model, kit):
    live = kit.random_sequences(5)
    idle = [TrainSequence(payload=s.payload, advantage=0.0) for s in kit.random_sequences(4, seed=1)]
    totals = kit.counts_of([*live, *idle])
    skipping, full = kit.make_trainer(model), kit.make_trainer(model)
    for _ in range(3):
        train(skipping, live, totals)
        train(full, [*live, *idle], totals)
    for name, tensor in weights(full).items():
        torch.testing.assert_close(skipping.state()[name], tensor, atol=1e-6, rtol=1e-5)


def test_a_step_without_any_live_sequence_still_moves_by_momentum(model, kit):
    trainer = kit.make_trainer(model)
    sequences = kit.random_sequences(3)
    train(trainer, sequences, kit.counts_of(sequences))
    before = weights(trainer)
    applied = train(trainer, [], kit.counts_of(sequences))
    assert not applied.skipped
    assert applied.meter.report()["grad_norm"] == 0.0
    assert not torch.equal(trainer.state()["model.model.norm.weight"], before["model.model.norm.weight"])
    assert trainer.step == 2


def nan_loss(decisions):
    return Loss(loss_N=decisions.logprobs_N * float("nan"))


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(model, kit):
    algorithm = kit.Reinforce(loss_of=nan_loss)
    trainer = kit.make_trainer(model, algorithm, max_nonfinite_steps=2)
    sequences = kit.random_sequences(2)
    totals = kit.counts_of(sequences)
    before = weights(trainer)
    assert train(trainer, sequences, totals).skipped
    assert train(trainer, sequences, totals).skipped
    assert trainer.step == 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.state().items())
    with pytest.raises(TrainingError, match=r"step 3: .* not finite for 3 steps in a row .*max_nonfinite_steps = 2"):
        train(trainer, sequences, totals)


def test_a_finite_step_ends_the_row(model, kit):
    sequences = kit.random_sequences(2)
    totals = kit.counts_of(sequences)
    trainer = kit.make_trainer(model, max_nonfinite_steps=1)
    for is_bad in (True, False, True, False):
        trainer.algorithm = kit.Reinforce(loss_of=nan_loss) if is_bad else kit.Reinforce()
        assert train(trainer, sequences, totals).skipped is is_bad
    assert all(math.isfinite(tensor.sum()) for tensor in trainer.state().values())


def test_gradients_are_clipped_as_torch_does(model, kit):
    sequences = kit.random_sequences(4)
    totals = kit.counts_of(sequences)
    free, norm = gradient(kit.make_trainer(model, optimizer=OptimizerConfig(clip_norm=0.0)), sequences, totals)
    assert norm["grad_norm"] == pytest.approx(free.norm().item())
    trainer = kit.make_trainer(model, optimizer=OptimizerConfig(lr=1e-2, clip_norm=0.01))
    seen = []
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda *to: seen.append(trainer._gradients.flat.norm().item()) or step(*to)
    train(trainer, sequences, totals)
    assert seen == [pytest.approx(0.01, rel=1e-3)]


def test_the_optimizer_is_torchs_adamw(model, kit):
    """Three steps against torch's own loop, on a copy of the same weights."""
    config = OptimizerConfig(lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1, clip_norm=0.5, schedule="linear")
    trainer, twin = (kit.make_trainer(model, optimizer=config) for _ in range(2))
    module = twin.module
    for parameter in module.parameters():
        parameter.grad = None
    reference = torch.optim.AdamW(module.parameters(), lr=1.0, betas=(0.8, 0.9), weight_decay=0.1, foreach=False)
    sequences = kit.random_sequences(6)
    (batch,) = model.pack([s.payload for s in sequences], budget=1000)
    advantages = torch.tensor(
        [sequences[i].advantage for i, n in zip(batch.sequences, batch.num_decisions, strict=True) for _ in range(n)]
    )
    for step in range(1, 4):
        train(trainer, sequences, kit.counts_of(sequences))
        reference.param_groups[0]["lr"] = 1e-2 * (1.0 - 0.9 * step / 100)
        reference.zero_grad()
        (-(model.decide(module, batch, temperature=1.0).logprobs_N * advantages).mean()).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        reference.step()
    for mine, theirs in zip(trainer.module.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_mismatch_compares_only_decisions_of_the_same_version(model, kit):
    trainer = kit.make_trainer(model)
    payloads = [kit.payload([1, 2], [3, 4]), kit.payload([5], [6, 7, 8])]
    (batch,) = model.pack(payloads, budget=100)
    with torch.no_grad():
        true = model.decide(trainer.module, batch, temperature=1.0).logprobs_N.split(list(batch.num_decisions))
    exact = dict(zip(batch.sequences, true, strict=True))
    sequences = [
        TrainSequence(payload=kit.payload([1, 2], [3, 4], version=0, logprobs=exact[0] + 0.5), advantage=1.0),
        TrainSequence(payload=kit.payload([5], [6, 7, 8], version=-1, logprobs=exact[1] - 3.0), advantage=1.0),
    ]
    metrics = train(trainer, sequences, kit.counts_of(sequences)).meter.report()
    assert metrics["mismatch_kl"] == pytest.approx(0.5, abs=1e-4)
    assert metrics["mismatch_max_ratio"] == pytest.approx(math.exp(0.5), abs=1e-3)
    # k3, e^d - 1 - d with d = log π - log μ: over all five, of either version
    k3 = [math.exp(d) - 1 - d for d in (-0.5, -0.5, 3.0, 3.0, 3.0)]
    assert metrics["behaviour_kl"] == pytest.approx(sum(k3) / 5, abs=1e-3)


def check_a_metric_with_a_name_of_the_cores_is_refused(model, kit, name):
    """Added up under one name, both would be wrong."""
    loss_of = lambda decisions: Loss(loss_N=-decisions.logprobs_N, metrics={name: decisions.advantages_N})  # noqa: E731
    sequences = kit.random_sequences(2)
    with pytest.raises(TrainingError, match=f"a metric '{name}', which the core measures"):
        train(kit.make_trainer(model, kit.Reinforce(loss_of=loss_of)), sequences, kit.counts_of(sequences))


def test_a_metric_with_a_name_of_the_cores_is_refused(model, kit):
    for name in ["loss", "behaviour_kl", "grad_norm"]:
        check_a_metric_with_a_name_of_the_cores_is_refused(model, kit, name)


def test_entropy_is_there_on_demand_only(model, kit):
    sequences = kit.random_sequences(3)
    for needs_entropy in (False, True):
        algorithm = kit.Reinforce(needs_entropy=needs_entropy)
        metrics = train(kit.make_trainer(model, algorithm), sequences, kit.counts_of(sequences)).meter.report()
        assert ("entropy" in metrics) is needs_entropy
        assert (algorithm.seen[0].entropy_N is not None) is needs_entropy


def test_activation_checkpointing_changes_no_bit(model, kit):
    sequences = kit.random_sequences(6)
    plain, recomputing = kit.make_trainer(model), kit.make_trainer(model, parallel=ParallelConfig(recompute="full"))
    for trainer in (plain, recomputing):
        train(trainer, sequences, kit.counts_of(sequences))
    assert all(torch.equal(tensor, plain.state()[name]) for name, tensor in recomputing.state().items())


def test_bf16_computes_low_and_keeps_float32_weights(model, kit):
    sequences = kit.random_sequences(6)
    totals = kit.counts_of(sequences)
    full, _ = gradient(kit.make_trainer(model), sequences, totals)
    trainer = kit.make_trainer(model, precision="bf16")
    low, _ = gradient(trainer, sequences, totals)
    assert all(tensor.dtype == torch.float32 for tensor in trainer.state().values())
    assert not torch.equal(full, low)
    assert torch.cosine_similarity(full, low, dim=0) > 0.99


def test_sft_overfits_a_few_demonstrations(model, kit):
    demonstrations = [([1, 2, 3], [4, 5, 6, 2]), ([1, 7], [8, 2]), ([9], [10, 11, 12, 13, 2])]
    sequences = [TrainSequence(payload=tokens_payload(*pair), advantage=1.0) for pair in demonstrations]
    optimizer = OptimizerConfig(lr=2e-2, betas=(0.9, 0.99), schedule="linear", warmup_steps=5)
    trainer = kit.make_trainer(model, optimizer=optimizer)
    losses = [train(trainer, sequences, kit.counts_of(sequences)).meter.report()["loss"] for _ in range(60)]
    assert losses[0] > 3.0
    assert losses[-1] < 0.05
    assert "mismatch_kl" not in train(trainer, sequences, kit.counts_of(sequences)).meter.report()


def test_a_stage_starts_with_a_fresh_optimizer_and_its_own_clock(model, kit):
    trainer = kit.make_trainer(model)
    sequences = kit.random_sequences(3)
    for _ in range(4):
        train(trainer, sequences, kit.counts_of(sequences))
    optimizer = OptimizerConfig(lr=1.0, warmup_steps=10)
    trainer.begin_stage(kit.stage_of(optimizer, index=1, first_step=4), kit.Reinforce(), 1.0)
    assert all(not tensor.any() for tensor in trainer.optimizer.state().values())
    metrics = train(trainer, sequences, Counts(sequences=3, decisions=10)).meter.report()
    assert metrics["lr"] == pytest.approx(0.1)


def test_replicas_meet_where_the_state_is_kept(model, kit):
    trainer = kit.make_trainer(model)
    away = Trainer(
        model=model,
        module=trainer.module,
        policy=PolicyConfig(precision="fp32"),
        device=torch.device("meta"),
        world=single_world(),
    )
    assert away.state_device == torch.device("cpu")


def test_the_temperature_divides_the_logits(model, kit):
    algorithm = kit.Reinforce()
    trainer = kit.make_trainer(model, algorithm)
    trainer.begin_stage(kit.stage_of(), algorithm, 0.5)
    sequences = kit.random_sequences(2)
    (batch,) = model.pack([s.payload for s in sequences], budget=1000)
    with torch.no_grad():
        expected = model.decide(trainer.module, batch, temperature=0.5).logprobs_N
    train(trainer, sequences, kit.counts_of(sequences))
    torch.testing.assert_close(algorithm.seen[0].logprobs_N.detach(), expected)


def test_each_sequence_is_priced_at_the_temperature_that_it_was_drawn_at(model, kit):
    temperatures = (None, 0.5, 2.0, 0.5, None)
    sequences = [
        attrs.evolve(sequence, temperature=temperature)
        for sequence, temperature in zip(kit.random_sequences(5), temperatures, strict=True)
    ]
    totals = kit.counts_of(sequences)
    trainer = kit.make_trainer(model)
    trainer.begin_stage(kit.stage_of(), kit.Reinforce(), 0.8)
    expected = torch.zeros(())
    trainer.module.set_attn_implementation("sdpa")
    for sequence in sequences:
        prompt, completion = (
            np.frombuffer(sequence.payload.arrays[name].data, dtype=np.int32).tolist()
            for name in ("prompt", "completion")
        )
        logits = trainer.module(torch.tensor([prompt + completion])).logits[0] / (sequence.temperature or 0.8)
        logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        chosen = logprobs[torch.arange(len(completion)), torch.tensor(completion)]
        expected = expected - sequence.advantage * chosen.sum() / totals.decisions
    trainer.module.zero_grad()
    expected.backward()
    gradients = torch.cat([p.grad.flatten().clone() for p in trainer.module.parameters()])
    trainer.module.set_attn_implementation("cosmos_packed")
    trainer.module.zero_grad()
    share = Share(sequences=tuple(sequences), counts=totals, temperatures=(None, 0.5, 2.0))
    metrics = trainer.train(share, totals, solo(), Stopwatch(trainer.device)).meter.report()
    assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-5)
    found = torch.cat([p.grad.flatten() for p in trainer.module.parameters()])
    scale = min(1.0, 1.0 / float(gradients.norm()))
    torch.testing.assert_close(found, gradients * scale, atol=1e-5, rtol=1e-4)


def test_another_algorithm_and_other_rates_leave_the_optimizer_as_it_is(model, kit):
    sequences = kit.random_sequences(4)
    trainer = kit.make_trainer(model)
    train(trainer, sequences, kit.counts_of(sequences))
    before = {name: tensor.clone() for name, tensor in trainer.state().items()}
    algorithm = kit.Reinforce()
    trainer.change(kit.stage_of(OptimizerConfig(lr=1e-30)), algorithm)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.state().items())
    train(trainer, sequences, kit.counts_of(sequences))
    assert algorithm.seen
    for name, tensor in trainer.state().items():
        assert torch.equal(tensor, before[name]) == name.startswith("model."), name
