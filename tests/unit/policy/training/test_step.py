"""Steps of groups of one and of two (threads with gloo), from orders to reports."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch

from cosmos_core.config.schema import DatasetConfig
from cosmos_core.errors import DataError, TransportError
from cosmos_core.models import tokens_payload
from cosmos_core.policy.batches.batch import Share, TrainSequence
from cosmos_core.policy.batches.share import ShareReader
from cosmos_core.policy.mesh.pipeline import Forward
from cosmos_core.policy.processes.group import solo
from cosmos_core.policy.processes.rendezvous import GroupStore, form_group
from cosmos_core.policy.replica import transfer_state
from cosmos_core.policy.training.step import StepRunner
from cosmos_core.protocols import Aggregation
from cosmos_core.transport.directives import GroupRef, TrainOrder
from cosmos_core.transport.reports import REPORT, StepDone, StepFailed
from cosmos_core.types import Sample, SampleStatus

CPU = torch.device("cpu")


class Payloads:
    """Stands for the line to the rollout replicas."""

    def __init__(self, held, error=None):
        self.held, self.error, self.asked = held, error, []

    def fetch(self, requests, timeout_s):
        self.asked.append(dict(requests))
        if self.error:
            raise TransportError(self.error)
        return {lease: self.held[lease] for leases in requests.values() for lease in leases if lease in self.held}


class Rows:
    def __init__(self, rows):
        self.rows = rows

    def row(self, split, index):
        assert split == "train"
        if self.rows[index] is None:
            raise DataError(f"row {index}: bad")
        return self.rows[index]

    def size(self, split):
        return len(self.rows)


@pytest.fixture
def batch(kit):
    """An order's groups and their payloads: 6 groups of 2 samples, one of them without a live sample."""
    sequences = iter(kit.random_sequences(12))
    groups, held = [], {}
    for lease in range(6):
        pair = [next(sequences) for _ in range(2)]
        rewards = [0.0, 0.0] if lease == 2 else [s.advantage for s in pair]
        samples = tuple(
            Sample(
                index=i,
                status=SampleStatus.OK,
                reward=reward,
                rewards={},
                oldest_version=0,
                newest_version=0,
                num_units=s.payload.arrays["completion"].shape[0],
                num_prompt_units=s.payload.arrays["prompt"].shape[0],
            )
            for i, (s, reward) in enumerate(zip(pair, rewards, strict=True))
        )
        groups.append(GroupRef(position=lease, row=lease, lease=lease, endpoint="tcp://a:1", samples=samples))
        held[lease] = [s.payload for s in pair]
    return tuple(groups), held


def order_of(groups, *shares, step=1):
    return TrainOrder(step=step, attempt=1, stage=0, groups=groups, shares=shares, publish=False)


def runner_of(kit, model, held, *, algorithm=None, rows=(), seed=0, error=None, longest=100, **policy):
    trainer = kit.make_trainer(model, algorithm, seed=seed, **policy)
    reader = ShareReader(
        model=model, payloads=Payloads(held, error), dataset=lambda: Rows(rows), longest=longest, world=trainer.world
    )
    return StepRunner(trainer=trainer, reader=reader)


def nothing():
    pass


def pair(work):
    """Run `work(group)` as both members of a group."""
    store = GroupStore("127.0.0.1")

    def member(rank):
        torch.set_num_threads(1)
        group = form_group(
            generation=1,
            rank=rank,
            size=2,
            store=store.endpoint,
            address="127.0.0.1",
            device=CPU,
            interrupted=lambda: False,
            timeout_s=20.0,
        )
        return work(group)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(member, range(2)))


def check_two_replicas(model, kit, batch, aggregation):
    groups, held = batch
    single = runner_of(kit, model, held, algorithm=kit.Reinforce(aggregation=aggregation))
    alone = [single.run(order_of(groups, tuple(range(6)), step=s), solo(), nothing, 0.0) for s in (1, 2, 3)]
    runners = [runner_of(kit, model, held, algorithm=kit.Reinforce(aggregation=aggregation)) for _ in range(2)]

    def work(group):
        runner = runners[group.rank]
        return [runner.run(order_of(groups, (0, 2, 5), (1, 3, 4), step=s), group, nothing, 0.0) for s in (1, 2, 3)]

    first, second = pair(work)
    for mine, one in zip(first, alone, strict=True):
        assert isinstance(mine, StepDone)
        names = {"loss", "grad_norm", "units", "trained_sequences", "skipped_sequences", "mismatch_kl", "behaviour_kl"}
        for name in names & one.metrics.keys():
            assert mine.metrics[name] == pytest.approx(one.metrics[name], abs=1e-6, rel=1e-5), name
    assert all(done.metrics == {} for done in second)
    assert ["mismatch_kl" in done.metrics for done in first] == [True, False, False]
    for name, tensor in single.trainer.state().items():
        assert torch.equal(runners[0].trainer.state()[name], runners[1].trainer.state()[name])
        torch.testing.assert_close(runners[0].trainer.state()[name], tensor, atol=1e-6, rtol=1e-5)


def test_two_replicas_do_what_one_does(model, kit, batch):
    check_two_replicas(model, kit, batch, Aggregation.SEQUENCE_MEAN_TOKEN_MEAN)


def test_the_metrics_of_a_step(model, kit, batch):
    groups, held = batch
    runner = runner_of(kit, model, held)
    done = runner.run(order_of(groups, tuple(range(6))), solo(), nothing, 1.5)
    assert (done.step, done.attempt, done.generation, done.skipped) == (1, 1, 0, False)
    assert done.metrics["sequences"] == 12
    assert (done.metrics["trained_sequences"], done.metrics["skipped_sequences"]) == (10, 2)
    assert done.metrics["units"] == sum(s.num_units for g in groups for s in g.samples)
    assert done.metrics["prompt_units"] == sum(s.num_prompt_units for g in groups for s in g.samples)
    assert done.metrics["wait_s"] == 1.5
    times = ("fetch_s", "pack_s", "forward_backward_s", "reduce_s", "optimizer_s", "publish_s")
    assert all(done.metrics[name] >= 0.0 for name in times)
    assert done.metrics["lr"] == pytest.approx(1e-2)
    assert runner.reader.payloads.asked == [{"tcp://a:1": [0, 1, 3, 4, 5]}]
    assert done.metrics["memory_bytes"] == runner.trainer.used["memory_bytes"] > 0
    assert "mfu" not in done.metrics


def test_utilisation_is_of_what_the_step_computed(model, kit, batch, monkeypatch):
    groups, held = batch
    runner, asked = runner_of(kit, model, held), []
    monkeypatch.setattr("cosmos_core.policy.training.step.peak_of", lambda _: 1e12)
    monkeypatch.setattr(runner.trainer, "flops", lambda lengths, decisions: asked.append((lengths, decisions)) or 1e9)
    done = runner.run(order_of(groups, tuple(range(6))), solo(), nothing, 1.5)
    ((lengths, decisions),) = asked
    assert len(lengths) == done.metrics["trained_sequences"]
    assert decisions < sum(lengths)
    seconds = sum(
        done.metrics[f"{part}_s"] for part in ("pack", "old_logprobs", "forward_backward", "reduce", "optimizer")
    )
    assert done.metrics["mfu"] == pytest.approx(1e-3 / seconds)


def test_weights_are_published_after_the_step(model, kit, batch):
    groups, held = batch
    runner = runner_of(kit, model, held)
    steps = []
    runner.run(order_of(groups, tuple(range(6))), solo(), lambda: steps.append(runner.trainer.step), 0.0)
    assert steps == [1]


def test_missing_payloads_fail_the_step_and_change_nothing(model, kit, batch):
    groups, held = batch
    del held[4]
    runner = runner_of(kit, model, held)
    before = {name: tensor.clone() for name, tensor in runner.trainer.state().items()}
    failed = runner.run(order_of(groups, tuple(range(6))), solo(), nothing, 0.0)
    assert failed.missing == (4,)
    assert isinstance(failed, StepFailed)
    assert runner.trainer.step == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in runner.trainer.state().items())


def test_a_member_without_payloads_fails_the_step_of_all(model, kit, batch):
    groups, held = batch
    less = {lease: payloads for lease, payloads in held.items() if lease != 3}
    runners = [runner_of(kit, model, held), runner_of(kit, model, less)]

    def work(group):
        return runners[group.rank].run(order_of(groups, (0, 1, 2), (3, 4, 5)), group, nothing, 0.0)

    first, second = pair(work)
    assert first == second
    assert first.missing == (3,)
    assert "member 1: the payloads of 1 leases" in first.reason
    assert all(runner.trainer.step == 0 for runner in runners)


def test_a_malformed_stream_makes_every_lease_missing(model, kit, batch):
    groups, held = batch
    failed = runner_of(kit, model, held, error="garbage").run(order_of(groups, tuple(range(6))), solo(), nothing, 0.0)
    assert failed.missing == (0, 1, 3, 4, 5)
    assert failed.reason == "member 0: garbage"


def test_demonstrations_of_prompts_of_unwanted_lengths_are_dropped(model, kit):
    trainer = kit.make_trainer(model)
    pairs = {0: ([1], [3, 2]), 1: ([1, 2], [3, 2]), 2: ([1, 2, 3], [4, 2])}
    encoding = SimpleNamespace(encode_demonstration=lambda prompt: tokens_payload(*prompt))
    config = DatasetConfig(plugin="rows", min_prompt_units=2, max_prompt_units=2)
    parts = {
        "model": encoding,
        "payloads": Payloads({}),
        "dataset": lambda: Rows(pairs),
        "longest": 59,
        "world": trainer.world,
    }
    groups = tuple(GroupRef(position=row, row=row) for row in pairs)
    share = ShareReader(**parts, config=config).read(order_of(groups, (0, 1, 2)), solo(), None)
    assert share.dropped == ((0, "prompt_too_short"), (2, "prompt_too_long"))
    assert len(share.sequences) == 1


def test_demonstrations_are_read_and_unusable_rows_are_dropped(model, kit):
    pairs = {0: ([1, 2], [3, 2]), 1: None, 2: ([1] * 30, [2] * 30), 3: ([4], [5, 6, 2])}

    class Encoding:
        def __getattr__(self, name):
            return getattr(model, name)

        def encode_demonstration(self, prompt):
            return tokens_payload(*prompt)

    groups = tuple(GroupRef(position=100 + row, row=row) for row in pairs)
    trainer = kit.make_trainer(model)
    reader = ShareReader(
        model=Encoding(), payloads=Payloads({}), dataset=lambda: Rows(pairs), longest=59, world=trainer.world
    )
    done = StepRunner(trainer=trainer, reader=reader).run(order_of(groups, (0, 1, 2, 3)), solo(), nothing, 0.0)
    assert done.dropped == ((101, "bad_row"), (102, "prompt_too_long"))
    assert set(done.details) == {"bad_row", "prompt_too_long"}
    assert done.details["bad_row"].startswith("train row 1: ")
    assert done.details["prompt_too_long"].startswith("train row 2: ")
    assert (done.metrics["sequences"], done.metrics["units"], done.metrics["prompt_units"]) == (2, 5, 3)

    twin = kit.make_trainer(model)
    sequences = [TrainSequence(payload=tokens_payload(*pairs[row]), advantage=1.0) for row in (0, 3)]
    from cosmos_core.policy.training.metrics import Stopwatch

    expected = twin.train(
        Share(sequences=tuple(sequences), counts=kit.counts_of(sequences)),
        kit.counts_of(sequences),
        solo(),
        Stopwatch(CPU),
    ).meter.report()
    assert done.metrics["loss"] == expected["loss"]


def test_what_is_wrong_with_a_row_fits_a_report_whatever_it_says(model, kit):
    class Odd:
        def __getattr__(self, name):
            return getattr(model, name)

        def encode_demonstration(self, prompt):
            raise DataError("\ud800" + "x" * 9999)

    groups = (GroupRef(position=7, row=0),)
    trainer = kit.make_trainer(model)
    reader = ShareReader(
        model=Odd(), payloads=Payloads({}), dataset=lambda: Rows([([1], [2])]), longest=59, world=trainer.world
    )
    done = StepRunner(trainer=trainer, reader=reader).run(order_of(groups, (0,)), solo(), nothing, 0.0)
    assert REPORT.decode(REPORT.encode(done)) == done
    assert done.details["bad_row"].startswith("train row 0: ?xxx")
    assert len(done.details["bad_row"]) < 600


def test_the_lead_keeps_the_advantages_of_the_whole_batch(model, kit, batch):
    groups, held = batch
    put = []
    # Made one after the other: weights are drawn from the generator that both threads share.
    runners = [runner_of(kit, model, held) for _ in range(2)]

    def work(group):
        kept = SimpleNamespace(put=lambda rows, num_bytes: put.append((group.rank, rows)))
        runner = attrs.evolve(runners[group.rank], samples=kept)
        runner.run(order_of(groups, (0, 2, 5), (1, 3, 4)), group, nothing, 0.0)

    pair(work)
    ((rank, rows),) = put
    assert rank == 0
    assert [row["lease"] for row in rows] == [group.lease for group in groups]
    assert [row["advantages"] for row in rows] == kit.Reinforce().advantages(groups)
    assert [row["trained"] for row in rows] == [[each != 0 for each in row["advantages"]] for row in rows]
    assert {(row["step"], row["attempt"], row["generation"]) for row in rows} == {(1, 1, 1)}

    # Of what this replica trained, with ratios of the weights that the step began from to what the engine recorded.
    trainer = kit.make_trainer(model)
    for row in rows:
        for index, (is_trained, ratios) in enumerate(zip(row["trained"], row["ratios"], strict=True)):
            assert (ratios is not None) == (is_trained and row["lease"] in (0, 2, 5))
            if ratios is not None:
                payload = held[row["lease"]][index]
                packed = model.pack([payload], **trainer._packer.packing)
                (decided,) = trainer._executor.evaluate(packed, Forward(temperature=1.0))
                recorded = np.frombuffer(payload.arrays["logprobs"].data, np.float32)
                np.testing.assert_allclose(ratios, np.exp(decided.logprobs_N.numpy() - recorded), rtol=1e-4)


def test_a_step_of_unusable_rows_only_is_done(model, kit):
    groups = (GroupRef(position=7, row=0),)
    done = runner_of(kit, model, {}, rows=[None]).run(order_of(groups, (0,)), solo(), nothing, 0.0)
    assert done.dropped == ((7, "bad_row"),)
    assert not done.skipped


def test_a_joiner_takes_the_sources_state(model, kit, batch):
    groups, held = batch
    runners = [runner_of(kit, model, held, seed=9), runner_of(kit, model, held)]
    for step in (1, 2):
        runners[1].run(order_of(groups, tuple(range(6)), step=step), solo(), nothing, 0.0)
    runners[1].trainer.begin_stage(kit.stage_of(index=1, first_step=2), kit.Reinforce(), 1.0)
    runners[1].run(order_of(groups, tuple(range(6)), step=3), solo(), nothing, 0.0)
    begun = []

    def work(group):
        trainer = runners[group.rank].trainer

        def begin(index):
            begun.append((group.rank, index))
            trainer.begin_stage(kit.stage_of(index=index, first_step=2), kit.Reinforce(), 1.0)

        transfer_state(trainer, group, 1, begin)
        return runners[group.rank].run(order_of(groups, (0, 1, 2), (3, 4, 5), step=4), group, nothing, 0.0)

    pair(work)
    assert begun == [(0, 1)]
    assert [runner.trainer.step for runner in runners] == [4, 4]
    assert all(torch.equal(t, runners[1].trainer.state()[n]) for n, t in runners[0].trainer.state().items())
