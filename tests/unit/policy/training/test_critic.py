import attrs
import pytest
import torch

from cosmos_core.config.schema import CriticConfig
from cosmos_core.policy.batches.batch import Share
from cosmos_core.policy.processes.group import solo
from cosmos_core.policy.training.critic import Critic
from cosmos_core.policy.training.metrics import Stopwatch
from cosmos_core.protocols import Loss
from cosmos_core.protocols.algorithm import Estimate


def judging(kit, heard):
    """The critic learns the value 3 of every decision."""

    @attrs.frozen(kw_only=True)
    class Judging(kit.Reinforce):
        needs_critic: bool = True
        skips_zero_advantage: bool = False

        def summarise(self, taken):
            heard.append(taken.values_n)
            return [0.0]

        def settle(self, batch):
            return lambda taken: Estimate(
                advantages_n=torch.zeros_like(taken.values_n), targets_n=torch.full_like(taken.values_n, 3)
            )

        def loss(self, decisions):
            self.seen.append(decisions)
            return Loss(loss_N=(decisions.values_N - decisions.targets_N).square() + 0.0 * decisions.logprobs_N)

    return Judging()


def make(kit, model, algorithm, *, trunk, budget=1000):
    critic = Critic(CriticConfig(lr=0.1, trunk=trunk), kit.QWEN3["hidden_size"], kit.CPU)
    return kit.make_trainer(model, algorithm, critic=critic, micro_batch_units=budget)


def train(trainer, sequences, kit):
    totals = kit.counts_of(sequences)
    share = Share(sequences=tuple(sequences), counts=totals)
    return trainer.train(share, totals, solo(), Stopwatch(trainer.device)).meter.report()


def test_the_critic_learns_and_what_it_says_is_known_before_the_step(model, kit):
    heard, sequences = [], kit.random_sequences(6)
    algorithm = judging(kit, heard)
    trainer = make(kit, model, algorithm, trunk=False)
    losses = [train(trainer, sequences, kit)["loss"] for _ in range(30)]
    assert losses[0] == pytest.approx(9.0)
    assert losses[-1] < 1.0
    # Nothing is expected of what has learnt nothing.
    assert all(not values.any() for values in heard[: len(sequences)])
    assert not any(values.requires_grad for values in heard)


def test_its_error_trains_the_layers_only_if_it_may(model, kit):
    for trunk in [False, True]:
        trainer = make(kit, model, judging(kit, []), trunk=trunk)
        before = {name: tensor.clone() for name, tensor in trainer.module.named_parameters()}
        for _ in range(2):
            # At first the head is zero, and passes nothing on.
            train(trainer, kit.random_sequences(6), kit)
        changed = [name for name, tensor in trainer.module.named_parameters() if not torch.equal(tensor, before[name])]
        assert bool(changed) == trunk


def test_micro_batches_make_no_difference(model, kit):
    sequences, states = kit.random_sequences(9), []
    for budget in (20, 1000):
        trainer = make(kit, model, judging(kit, []), trunk=True, budget=budget)
        for _ in range(2):
            train(trainer, sequences, kit)
        states.append({name: tensor.clone() for name, tensor in trainer.state().items()})
    assert {name for name in states[0] if name.startswith("critic.")} >= {
        "critic.weight",
        "critic.optimizer.weight.step",
    }
    for name, tensor in states[0].items():
        torch.testing.assert_close(tensor, states[1][name], rtol=1e-4, atol=1e-5)


def test_an_algorithm_that_needs_none_leaves_it_alone(model, kit):
    trainer = make(kit, model, kit.Reinforce(), trunk=True)
    train(trainer, kit.random_sequences(6), kit)
    assert not trainer.state()["critic.weight"].any()
