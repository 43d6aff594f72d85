"""The moving average of the weights: by hand, in checkpoints, published, consulted and exported."""

import attrs
import pytest
import torch

from cosmos_core.config.job import stages
from cosmos_core.config.loading import recipe_from
from cosmos_core.config.schema import AverageConfig, LoraConfig, OptimizerConfig, PolicyConfig
from cosmos_core.errors import ConfigError
from cosmos_core.plugins.recipe import unmet
from cosmos_core.policy.batches.batch import Share
from cosmos_core.policy.checkpoints.checkpoint import Place
from cosmos_core.policy.checkpoints.reader import restore
from cosmos_core.policy.checkpoints.saver import copy_state, write_checkpoint
from cosmos_core.policy.mesh.layout import layout_of
from cosmos_core.policy.processes.group import solo
from cosmos_core.policy.processes.world import single_world
from cosmos_core.policy.replica import transfer_state
from cosmos_core.policy.training.average import Average, averaged_tensors
from cosmos_core.policy.training.metrics import Stopwatch
from cosmos_core.policy.training.trainer import Trainer
from cosmos_core.protocols import Loss
from cosmos_core.run.export import _is_average, load_weights
from cosmos_core.weights.digest import tensor_digests
from cosmos_core.weights.snapshot import take_snapshot, view
from tests.merging import published
from tests.unit.policy.training.test_step import pair


def trainer_of(kit, model, algorithm=None, *, seed=0, precision="fp32", **average):
    optimizer = OptimizerConfig(lr=1e-2)
    return kit.make_trainer(
        model, algorithm, optimizer=optimizer, seed=seed, precision=precision, average=AverageConfig(**average)
    )


def step(trainer, kit, seed=0):
    sequences = kit.random_sequences(5, seed=seed)
    totals = kit.counts_of(sequences)
    share = Share(sequences=tuple(sequences), counts=totals)
    return trainer.train(share, totals, solo(), Stopwatch(trainer.device)).meter.report()


def weights(trainer):
    return {name: tensor.clone() for name, tensor in averaged_tensors(trainer.module).items()}


def average(trainer):
    state = trainer.state()
    return {name.removeprefix("average."): each.clone() for name, each in state.items() if name.startswith("average.")}


def test_the_average_is_that_worked_out_by_hand(model, kit):
    for table, decays in [({"decay": 0.9}, [0.9, 0.9, 0.9]), ({"decay": 0.5, "growth": 0.2}, [0.2, 0.4, 0.5])]:
        trainer = trainer_of(kit, model, **table)
        expected = {name: each.double() for name, each in weights(trainer).items()}
        for number, decay in enumerate(decays):
            step(trainer, kit, number)
            expected = {name: decay * expected[name] + (1 - decay) * each for name, each in weights(trainer).items()}
        found = average(trainer)
        assert found.keys() == expected.keys()
        for name, each in found.items():
            torch.testing.assert_close(each.double(), expected[name], rtol=1e-6, atol=1e-7)
            assert not torch.equal(each, weights(trainer)[name])


def test_the_decay_of_the_old_policy_of_diffusion_nft():
    """min(0.001 · 5 k, 0.5) after iteration k."""
    found = Average(AverageConfig(decay=0.5, growth=0.005), torch.nn.Linear(1, 1))
    assert [found.decay(k) for k in (1, 2, 99, 100, 1000)] == pytest.approx([0.005, 0.01, 0.495, 0.5, 0.5])


def test_growth_counts_the_steps_of_a_stage(model, kit):
    trainer = trainer_of(kit, model, decay=0.5, growth=0.2)
    step(trainer, kit)
    before = average(trainer)
    trainer.begin_stage(kit.stage_of(index=1, first_step=1), kit.Reinforce(), 1.0)
    assert all(torch.equal(each, before[name]) for name, each in average(trainer).items()), "it goes on"
    step(trainer, kit)
    for name, each in average(trainer).items():
        torch.testing.assert_close(each, 0.2 * before[name] + 0.8 * weights(trainer)[name])


def test_a_step_that_is_skipped_leaves_the_average_as_it_is(model, kit):
    broken = kit.Reinforce(loss_of=lambda decisions: Loss(loss_N=decisions.logprobs_N * float("nan")))
    trainer = trainer_of(kit, model, broken, decay=0.5)
    before = average(trainer)
    step(trainer, kit)
    assert all(torch.equal(each, before[name]) for name, each in average(trainer).items())


def test_the_weights_come_back_bit_for_bit(model, kit):
    trainer = trainer_of(kit, model, publish=True, decay=0.9)
    step(trainer, kit)
    present, mean = weights(trainer), average(trainer)

    def fail():
        with trainer.published():
            assert all(torch.equal(each, mean[name]) for name, each in published(trainer.module).items())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert all(torch.equal(each, present[name]) for name, each in weights(trainer).items())
    assert all(torch.equal(each, mean[name]) for name, each in average(trainer).items())


def test_the_average_stays_in_place_until_a_device_has_copied_it(model, kit, streams):
    trainer = trainer_of(kit, model, publish=True, decay=0.9)
    step(trainer, kit)
    with trainer.published():
        snapshot = take_snapshot(1, published(trainer.module), torch.bfloat16)
        mean = {name: each.bfloat16() for name, each in published(trainer.module).items()}
    assert snapshot.digests() == tensor_digests(mean)
    assert all(torch.equal(view(snapshot.file.buffer, each), mean[each.name]) for each in snapshot.entries)


def test_the_weights_are_published_where_the_average_is_not(model, kit):
    trainer = trainer_of(kit, model, decay=0.9)
    step(trainer, kit)
    present = weights(trainer)
    with trainer.published():
        assert all(torch.equal(each, present[name]) for name, each in weights(trainer).items())


def test_engines_that_have_the_average_are_not_compared_with_the_weights(model, kit):
    assert "mismatch_kl" in step(trainer_of(kit, model), kit)
    found = step(trainer_of(kit, model, publish=True), kit)
    assert "mismatch_kl" not in found
    assert "behaviour_kl" in found


def test_the_held_out_loss_is_of_what_is_published(model, kit):
    for publish in [False, True]:
        trainer = trainer_of(kit, model, decay=0.9, publish=publish)
        step(trainer, kit)
        share = Share(sequences=tuple(kit.random_sequences(3, seed=9)), counts=kit.counts_of([]))
        other = kit.make_trainer(model)
        chosen = average(trainer) if publish else weights(trainer)
        for name, tensor in averaged_tensors(other.module).items():
            tensor.copy_(chosen[name])
        assert trainer.measure(share) == other.measure(share)


def consulting(kit, **declared):
    @attrs.frozen(kw_only=True)
    class Consults(kit.Reinforce):
        skips_zero_advantage: bool = False
        old_logprobs: str = "none"
        consults: dict = attrs.field(factory=lambda: {"average": None})

    return Consults(**declared)


def test_the_average_is_consulted_as_it_was_before_the_step(model, kit):
    algorithm = consulting(kit)
    trainer = trainer_of(kit, model, algorithm, decay=0.9)
    step(trainer, kit)
    before = average(trainer)
    algorithm.seen.clear()
    step(trainer, kit, 3)
    other = kit.make_trainer(model, seed=1)
    for name, tensor in averaged_tensors(other.module).items():
        tensor.copy_(before[name])
    batches = model.pack([each.payload for each in kit.random_sequences(5, seed=3)], budget=8192)
    expected = [model.decide(other.module, batch, temperature=1.0).logprobs_N for batch in batches]
    found = [decisions.frozen["average"].logprobs_N for decisions in algorithm.seen]
    assert all(map(torch.equal, found, expected))


def test_what_is_computed_after_the_average_was_consulted_is_of_the_weights(model, kit):
    for precision in ["fp32", "bf16"]:
        algorithm = consulting(kit, old_logprobs="recompute")
        trainer = trainer_of(kit, model, algorithm, precision=precision, decay=0.99)
        for seed in range(3):
            algorithm.seen.clear()
            step(trainer, kit, seed)
        first = algorithm.seen[0]
        assert torch.equal(first.old_logprobs_N, first.logprobs_N.detach())
        assert not torch.equal(first.old_logprobs_N, first.frozen["average"].logprobs_N)


def test_a_recipe_without_the_table_is_refused(kit):
    raw = {
        "run": {"name": "demo", "steps": 6},
        "model": {"plugin": "hf", "config": {}},
        "algorithm": {"plugin": "nft"},
        "policy": {"optimizer": {"lr": 1e-6}},
        "dataset": {"plugin": "numbers"},
    }
    recipe = recipe_from(raw)
    (problem,) = unmet(recipe, stages(recipe)[0], consulting(kit))
    assert problem.startswith("policy.average: 'nft'")
    assert "publish = true where rollouts are to come from the average" in problem
    recipe = recipe_from({**raw, "policy": {"optimizer": {"lr": 1e-6}, "average": {}}})
    assert list(unmet(recipe, stages(recipe)[0], consulting(kit))) == []


def test_a_resumed_run_goes_on_with_the_same_average(model, kit, tmp_path):
    whole = trainer_of(kit, model, decay=0.5, growth=0.2)
    for number in range(2):
        step(whole, kit, number)
    place = Place(run_id="r", step=2, stage=0, nonfinite_steps=0)
    path = write_checkpoint(str(tmp_path), copy_state(whole.state(), place))
    resumed = trainer_of(kit, model, seed=4, decay=0.5, growth=0.2)
    restore(resumed, path, lambda index: None)
    for trainer in (whole, resumed):
        step(trainer, kit, 2)
    assert all(torch.equal(each, whole.state()[name]) for name, each in resumed.state().items())

    module = model.build(seed=8, dtype=torch.float32, device=kit.CPU)
    load_weights(module, path, is_average=True)
    saved = copy_state(whole.state(), place).shares
    assert saved.keys() >= {f"average.{name}" for name in averaged_tensors(module)}
    loaded = {name: each.clone() for name, each in averaged_tensors(module).items()}
    load_weights(module, path)
    assert any(not torch.equal(each, loaded[name]) for name, each in averaged_tensors(module).items())


def test_an_export_is_of_what_the_recipe_says_unless_told_otherwise():
    def policy(**table):
        return PolicyConfig(average=AverageConfig(**table))

    assert not _is_average(PolicyConfig(), None)
    assert not _is_average(policy(), None)
    assert _is_average(policy(), True)
    assert _is_average(policy(publish=True), None)
    assert not _is_average(policy(publish=True, export=False), None)
    assert not _is_average(policy(publish=True), False)
    with pytest.raises(ConfigError, match=r"--average: the run's recipe has no \[policy.average\]"):
        _is_average(PolicyConfig(), True)


def test_a_joiner_takes_the_sources_average(model, kit):
    trainers = [trainer_of(kit, model, seed=9, decay=0.9), trainer_of(kit, model, decay=0.9)]
    step(trainers[1], kit)
    pair(lambda group: transfer_state(trainers[group.rank], group, 1, lambda index: None))
    assert all(torch.equal(each, average(trainers[1])[name]) for name, each in average(trainers[0]).items())


def test_of_a_model_with_adapters_these_alone_are_averaged(model, kit):
    policy = PolicyConfig(precision="fp32", lora=LoraConfig(rank=2), average=AverageConfig(decay=0.5, publish=True))
    world = single_world()
    layout = layout_of(policy, world.mesh, "cpu")
    module = model.build(seed=0, dtype=torch.float32, device=kit.CPU, layout=layout)
    trainer = Trainer(model=model, module=module, policy=policy, device=kit.CPU, world=world)
    trainer.begin_stage(kit.stage_of(), kit.Reinforce(), 1.0)
    first = weights(trainer)
    base = {name: each.clone() for name, each in published(module).items()}
    step(trainer, kit)
    assert {*average(trainer)} == {*first}
    assert all("lora_" in name for name in first)
    for name, each in average(trainer).items():
        torch.testing.assert_close(each, 0.5 * first[name] + 0.5 * weights(trainer)[name])
    with trainer.published():
        given = published(module)
    assert given.keys() == base.keys()
    assert any(not torch.equal(each, base[name]) for name, each in given.items())


def test_what_is_no_average_is_refused():
    for table in ({"decay": 1.0}, {"decay": -0.1}, {"growth": 0.0}):
        with pytest.raises(ValueError, match=r"decay|growth"):
            AverageConfig(**table)
