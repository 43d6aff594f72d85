"""Demonstrations of a step's rows, imitated beside its rollouts."""

import functools
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch

from cosmos_core.config.order import demonstration_seed
from cosmos_core.errors import DataError, TrainingError
from cosmos_core.models import tokens_payload
from cosmos_core.policy.batches.share import ShareReader
from cosmos_core.policy.processes.group import solo
from cosmos_core.policy.training.step import StepRunner
from cosmos_core.policy.training.trainer import MOST_UNIMITATED
from cosmos_core.protocols import Aggregation, Loss, NoOptions
from cosmos_core.transport.directives import GroupRef, TrainOrder
from cosmos_core.transport.reports import StepDone
from cosmos_core.types import Prompt, Sample, SampleStatus
from tests.unit.policy.training.test_frozen import plain
from tests.unit.policy.training.test_step import Payloads, pair
from tests.world_model import World, view, walked

WORLD = World(NoOptions(), SimpleNamespace(path=None))
COEFFICIENT = 0.3
POSITIONS = (40, 41, 42, 43)


def imitating(kit, *, times=1, **settings):
    @attrs.frozen(kw_only=True)
    class WithDemonstrations(kit.Reinforce):
        skips_zero_advantage: bool = False
        num_demonstrations: int = times
        imitated: list = attrs.field(factory=list)

        def imitation(self, decisions):
            self.imitated.append(decisions)
            return Loss(loss_N=-COEFFICIENT * decisions.logprobs_N, metrics={"nll": -decisions.logprobs_N})

    return WithDemonstrations(**settings)


class Rows:
    """Rows of the train split; None is one that cannot be read."""

    def __init__(self, rows):
        self.rows, self.asked = rows, []

    def row(self, split, index):
        assert split == "train"
        self.asked.append(index)
        if self.rows[index] is None:
            raise DataError(f"row {index}: bad")
        return self.rows[index]


class Encoding:
    """The tests' language model, for rows of token ids."""

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        return getattr(self.model, name)

    def encode_demonstration(self, prompt):
        return tokens_payload(*prompt)


def sample(index, reward, number, num_prompt_units=0):
    return Sample(
        index=index,
        status=SampleStatus.OK,
        reward=reward,
        rewards={},
        oldest_version=0,
        newest_version=0,
        num_units=number,
        num_prompt_units=num_prompt_units,
    )


def group_of(number, samples):
    return GroupRef(position=POSITIONS[number], row=number, lease=number, endpoint="tcp://a:1", samples=samples)


def text_batch(kit):
    """Four groups of two completions."""
    sequences = iter(kit.random_sequences(8))
    groups, held = [], {}
    for lease in range(4):
        two = [next(sequences) for _ in range(2)]
        held[lease] = [each.payload for each in two]
        sizes = [[each.payload.arrays[name].shape[0] for name in ("completion", "prompt")] for each in two]
        groups.append(
            group_of(lease, tuple(sample(i, each.advantage, *sizes[i]) for i, each in enumerate(two))),
        )
    return tuple(groups), held, [each for two in held.values() for each in two]


def world_batch(lengths=((3, 2), (4, 1), (2, 2), (5, 3))):
    """Four groups of two walks."""
    groups, held = [], {}
    for lease, pair_of in enumerate(lengths):
        prompt = WORLD.encode(Prompt(text=f"{lease} balls"))
        held[lease] = [walked(prompt, number, 10 * lease + index) for index, number in enumerate(pair_of)]
        groups.append(group_of(lease, tuple(sample(i, i - 0.3 * lease, n) for i, n in enumerate(pair_of))))
    return tuple(groups), held


def order_of(groups, *shares, stage=0):
    return TrainOrder(step=1, attempt=1, stage=stage, groups=groups, shares=shares, publish=False)


def runner_of(kit, model, held, rows, algorithm, **policy):
    trainer = kit.make_trainer(model, algorithm, **policy)
    reader = ShareReader(
        model=model,
        payloads=Payloads(held),
        dataset=functools.cache(lambda: Rows(rows)),
        longest=100,
        world=trainer.world,
        seed=5,
    )
    return StepRunner(trainer=trainer, reader=reader)


def run(runner, order, group=None):
    return runner.run(order, group or solo(), lambda: None, 0.0)


def applied_gradient(runner):
    held = []
    apply = runner.trainer._apply
    runner.trainer._apply = lambda *given: held.append(runner.trainer._gradients.flat.clone()) or apply(*given)
    return held


def mean(aggregation, losses, constant=10):
    """Of what each sequence's decisions cost."""
    match aggregation:
        case Aggregation.TOKEN_MEAN:
            return torch.cat(losses).mean()
        case Aggregation.SEQUENCE_MEAN_TOKEN_MEAN:
            return torch.stack([each.mean() for each in losses]).mean()
        case Aggregation.SEQUENCE_MEAN_TOKEN_SUM:
            return torch.stack([each.sum() for each in losses]).mean() / constant


PAIRS = [([1, 2], [3, 2]), ([7, 8, 9], [4, 5, 6, 2]), ([4], [5]), ([11, 12], [13, 14, 15])]


def check_ppo_ptx_is_the_sum_of_both_losses_in_float64(model, kit, aggregation, budget):
    """arXiv:2203.02155, equation 2: the rollouts' objective plus the demonstrations' log-likelihood, each averaged."""
    groups, held, payloads = text_batch(kit)
    algorithm = imitating(kit, aggregation=aggregation)
    runner = runner_of(kit, Encoding(model), held, PAIRS, algorithm, micro_batch_units=budget)
    flats = applied_gradient(runner)
    done = run(runner, order_of(groups, (0, 1, 2, 3)))

    module = plain(model, kit, 0).double()

    def logprobs(prompt, completion):
        ids = torch.tensor([*prompt, *completion])
        found = module(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        return found.gather(-1, torch.tensor([*completion])[:, None])[:, 0]

    rewards = [each.reward for group in groups for each in group.samples]
    pairs = [
        [np.frombuffer(each.arrays[name].data, np.int32).tolist() for name in ("prompt", "completion")]
        for each in payloads
    ]
    rollouts = mean(aggregation, [-reward * logprobs(*each) for reward, each in zip(rewards, pairs, strict=True)])
    ours = mean(aggregation, [-COEFFICIENT * logprobs(*each) for each in PAIRS])
    (rollouts + ours).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in module.parameters()])
    torch.testing.assert_close(flats[0].double(), expected, rtol=1e-5, atol=1e-6)
    assert done.metrics["loss"] == pytest.approx(rollouts.item(), abs=1e-6, rel=1e-5)
    assert done.metrics["imitation_loss"] == pytest.approx(ours.item(), abs=1e-6, rel=1e-5)
    counted = ("imitation_sequences", "imitation_units", "imitation_dropped", "sequences", "units")
    units = sum(each.num_units for group in groups for each in group.samples)
    assert [done.metrics[name] for name in counted] == [4, 10, 0, 8, units]
    nll = torch.cat([-logprobs(*each) for each in PAIRS]).mean()
    assert done.metrics["imitation_nll"] == pytest.approx(nll.item(), rel=1e-5)


def test_ppo_ptx_is_the_sum_of_both_losses_in_float64(model, kit):
    for budget in [20, 1000]:
        for aggregation in list(Aggregation):
            check_ppo_ptx_is_the_sum_of_both_losses_in_float64(model, kit, aggregation, budget)


def test_demonstrations_of_latents_are_drawn_by_the_groups_position(kit):
    groups, held = world_batch()
    rows = [Prompt(text=f"{row} balls", demonstration="a" * (row + 1)) for row in range(4)]
    algorithm = imitating(kit, times=2, loss_of=lambda decisions: Loss(loss_N=0.0 * decisions.logprobs_N))
    runner = runner_of(kit, WORLD, held, rows, algorithm, micro_batch_units=4)
    flats = applied_gradient(runner)
    done = run(runner, order_of(groups, (0, 1, 2, 3), stage=3))
    assert done.metrics["imitation_sequences"] == 8
    assert sorted(runner.reader.dataset().asked) == [0, 1, 2, 3], "each row is read once, and drawn twice"

    module = WORLD.build(seed=0, dtype=torch.float64, device=torch.device("cpu"))
    losses = []
    for row, prompt in enumerate(rows):
        for again in range(2):
            seed = demonstration_seed(5, 3, POSITIONS[row], again)
            payload = WORLD.noised(WORLD.encode_demonstration(prompt), seed)
            (batch,) = WORLD.pack([payload], budget=99)
            inputs = {name: each.double() for name, each in batch.inputs.items()}
            places = inputs["states"].movedim(1, -1)
            places = torch.cat([places, places.mean(1, keepdim=True).expand_as(places)], -1)
            clock = torch.stack([inputs["times"], inputs["times"].square()], -1)
            beside = module.clock(clock) + module.text(inputs["texts"])
            v = module.out(torch.tanh(module.into(places) + beside[:, None, None, None])).movedim(-1, 1)
            losses.append(COEFFICIENT * (v - inputs["aims"]).square().flatten(1).mean(1))
    total = torch.cat(losses).mean()
    total.backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in module.parameters()])
    assert done.metrics["imitation_loss"] == pytest.approx(total.item(), rel=1e-6)
    torch.testing.assert_close(flats[0].double(), expected, rtol=1e-6, atol=1e-6)


def check_two_replicas_do_what_one_does(kit, times):
    groups, held = world_batch()
    rows = [Prompt(text=f"{row} balls", demonstration="a" * (row + 1)) for row in range(4)]
    rows[2] = None
    runners = [
        runner_of(kit, WORLD, held, rows, imitating(kit, times=times), micro_batch_units=budget)
        for budget in (99, 2, 3)
    ]
    flats = [applied_gradient(runner) for runner in runners]
    alone = run(runners[0], order_of(groups, (0, 1, 2, 3)))
    order = order_of(groups, (2, 0), (1, 3))
    first, second = pair(lambda group: run(runners[1 + group.rank], order, group))
    assert isinstance(first, StepDone)
    assert first.dropped == second.dropped == alone.dropped == (), "the group of the row is trained on all the same"
    names = [name for name in alone.metrics if not name.endswith(("_s", "_bytes"))]
    assert {"imitation_loss", "imitation_nll", "imitation_sequences", "imitation_dropped"} <= {*names}
    for name in names:
        assert first.metrics[name] == pytest.approx(alone.metrics[name], abs=1e-6, rel=1e-5), name
    assert (alone.metrics["imitation_sequences"], alone.metrics["imitation_dropped"]) == (3 * times, 1)
    for (flat,) in flats[1:]:
        torch.testing.assert_close(flat, flats[0][0], rtol=1e-6, atol=1e-6)
    assert alone.metrics["sequences"] == 8


def test_two_replicas_do_what_one_does(kit):
    for times in [1, 3]:
        check_two_replicas_do_what_one_does(kit, times)


def test_a_step_whose_rows_cannot_be_read_trains_on_rollouts_alone(kit):
    groups, held = world_batch()
    algorithms = [imitating(kit), kit.Reinforce(skips_zero_advantage=False)]
    runners = [runner_of(kit, WORLD, held, [None] * 4, algorithm) for algorithm in algorithms]
    flats = [applied_gradient(runner) for runner in runners]
    first, second = (run(runner, order_of(groups, (0, 1, 2, 3))) for runner in runners)
    assert torch.equal(flats[0][0], flats[1][0])
    assert first.metrics["imitation_dropped"] == first.metrics["imitation_dropped_bad_row"] == 4
    assert "imitation_loss" not in first.metrics
    assert not any(name.startswith("imitation_") for name in second.metrics)
    assert algorithms[0].imitated == []


def test_steps_in_a_row_without_anything_to_imitate_end_the_run(kit):
    groups, held = world_batch()
    runner = runner_of(kit, WORLD, held, [None] * 4, imitating(kit))
    rows, readable = runner.reader.dataset(), [Prompt(text="x", demonstration="y")] * 4
    for _ in range(2):
        for step in range(MOST_UNIMITATED):
            assert isinstance(run(runner, order_of(groups, (0, 1, 2, 3))), StepDone), step
        rows.rows = readable
        run(runner, order_of(groups, (0, 1, 2, 3)))
        rows.rows = [None] * 4
    for _ in range(MOST_UNIMITATED):
        run(runner, order_of(groups, (0, 1, 2, 3)))
    with pytest.raises(TrainingError, match=f"{MOST_UNIMITATED + 1} steps in a row had no demonstration"):
        run(runner, order_of(groups, (0, 1, 2, 3)))


def test_what_is_known_of_an_imitated_decision(kit):
    groups, held = world_batch()
    rows = [Prompt(text="x", demonstration="y")] * 4
    algorithm = imitating(kit, old_logprobs="recompute")
    run(runner_of(kit, WORLD, held, rows, algorithm), order_of(groups, (0, 1, 2, 3)))
    (decisions,) = algorithm.imitated
    assert decisions.advantages_N.tolist() == [1.0] * 12
    assert decisions.behaviour_logprobs_N.tolist() == [0.0] * 12
    assert decisions.old_logprobs_N is None
    assert decisions.frozen == {}
    assert decisions.logprobs_N.requires_grad


def test_rollouts_of_another_temperature_leave_demonstrations_as_they_are(model, kit):
    groups, held, _ = text_batch(kit)
    losses = []
    for temperature in (None, 0.5):
        settings = {} if temperature is None else {"rollout.sampling.temperature": temperature}
        drawn = tuple(attrs.evolve(each, settings=settings) for each in groups)
        runner = runner_of(kit, Encoding(model), held, PAIRS, imitating(kit))
        losses.append(run(runner, order_of(drawn, (0, 1, 2, 3))).metrics)
    assert losses[0]["imitation_loss"] == losses[1]["imitation_loss"]
    assert losses[0]["loss"] != losses[1]["loss"]


def test_an_algorithm_may_not_have_a_metric_of_the_name_of_one_of_demonstrations(kit):
    groups, held = world_batch()
    algorithm = kit.Reinforce(
        loss_of=lambda decisions: Loss(loss_N=decisions.logprobs_N, metrics={"imitation_x": decisions.logprobs_N})
    )
    with pytest.raises(TrainingError, match="imitation_x"):
        run(runner_of(kit, WORLD, held, [None] * 4, algorithm), order_of(groups, (0, 1, 2, 3)))


def test_seeds_of_demonstrations_are_their_own():
    seeds = {
        demonstration_seed(0, stage, position, again) for stage in range(3) for position in range(9) for again in (0, 1)
    }
    assert len(seeds) == 54
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_held_out_latents_are_drawn_alike_at_each_step(kit):
    rows = [Prompt(text=f"{row} balls", demonstration="a" * (row + 1)) for row in range(4)]
    runner = runner_of(kit, WORLD, {}, rows, imitating(kit))
    runner.reader.dataset().row = lambda split, row: rows[row]
    shares = [runner.reader.heldout(3, solo()) for _ in range(2)]
    times = [[view(each.payload, "times").tolist() for each in share.sequences] for share in shares]
    assert times[0] == times[1]
    assert len({tuple(each) for each in times[0]}) == 3
    assert (shares[0].counts.decisions, shares[0].counts.prompt_units) == (9, 0)
