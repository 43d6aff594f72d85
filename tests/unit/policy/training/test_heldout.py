"""The held-out loss: alone, shared by replicas and by the processes of one, against a computation of its own."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from cosmos_core.config.schema import MeshConfig, PolicyConfig
from cosmos_core.errors import DataError
from cosmos_core.models import HuggingFaceModel, HuggingFaceOptions, tokens_payload
from cosmos_core.policy.batches.share import ShareReader
from cosmos_core.policy.mesh.layout import layout_of
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.policy.processes.group import GradientGroupError, solo
from cosmos_core.policy.processes.rendezvous import GroupStore, form_group
from cosmos_core.policy.processes.world import World
from cosmos_core.policy.training.step import StepRunner
from cosmos_core.policy.training.trainer import Trainer
from cosmos_core.protocols import ModelContext
from cosmos_core.testing.worlds import run_world
from cosmos_core.transport.directives import GroupRef, TrainOrder
from cosmos_core.transport.reports import HeldOutLoss, StepDone
from tests.tiny import QWEN3

CPU = torch.device("cpu")
LONGEST = 40


def make_rows(number=9, *, seed=7):
    """Rows of very different lengths."""
    generator = np.random.default_rng(seed)
    lengths = [30, 1, 2, 25, 3, 1, 12, 2, 4][:number]
    return [
        (generator.integers(3, 64, 1 + length % 5).tolist(), generator.integers(3, 64, length).tolist())
        for length in lengths
    ]


class Rows:
    """A dataset of (prompt, completion); None: a row that cannot be read."""

    def __init__(self, train, heldout):
        self.splits = {"train": train, "heldout": heldout}
        self.read = []

    def row(self, split, index):
        self.read.append((split, index))
        found = self.splits[split][index]
        if found is None:
            raise DataError(f"row {index}: bad")
        return found

    def size(self, split):
        return len(self.splits[split])


class Encoding:
    """A model whose prompts are pairs of ids."""

    def __init__(self, model):
        self._model = model

    def __getattr__(self, name):
        return getattr(self._model, name)

    def encode_demonstration(self, prompt):
        return tokens_payload(*prompt)


def reader_of(trainer, heldout, train=()):
    return ShareReader(
        model=Encoding(trainer.model),
        payloads=None,
        dataset=lambda: Rows(list(train), list(heldout)),
        longest=LONGEST,
        world=trainer.world,
    )


def measure(trainer, rows, group=None):
    return StepRunner(trainer=trainer, reader=reader_of(trainer, rows), num_heldout=len(rows)).measure(group or solo())


def expected_loss(module, rows):
    """One sequence after the other, by transformers' own model."""
    plain = type(module)._from_config(AutoConfig.for_model(**QWEN3), attn_implementation="eager")
    plain.load_state_dict(module.state_dict())
    total = number = 0
    for prompt, completion in rows:
        ids = torch.tensor([prompt + completion])
        with torch.no_grad():
            logprobs = plain(input_ids=ids).logits[0].log_softmax(-1)
        places = torch.arange(len(prompt), ids.shape[1])
        total -= float(logprobs[places - 1, ids[0, places]].sum())
        number += len(completion)
    return total / number, number


def members(work, size=2):
    """Run `work(group)` as each member of a group."""
    store = GroupStore("127.0.0.1")

    def member(rank):
        torch.set_num_threads(1)
        return work(
            form_group(
                generation=1,
                rank=rank,
                size=size,
                store=store.endpoint,
                address="127.0.0.1",
                device=CPU,
                interrupted=lambda: False,
                timeout_s=20.0,
            )
        )

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(member, range(size)))


def test_it_is_the_mean_over_all_decisions(model, kit):
    rows, trainer = make_rows(), kit.make_trainer(model, micro_batch_units=40)
    before = {name: tensor.clone() for name, tensor in trainer.state().items()}
    found = measure(trainer, rows)
    loss, number = expected_loss(trainer.module, rows)
    assert found.loss == pytest.approx(loss, abs=1e-5)
    assert (found.version, found.num_units, found.num_rows, found.dropped) == (0, number, 9, ())
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.state().items())
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in trainer.module.parameters())


def test_it_does_not_depend_on_the_temperature_of_the_stage(model, kit):
    trainer = kit.make_trainer(model)
    cool = measure(trainer, make_rows())
    trainer.begin_stage(kit.stage_of(), kit.Reinforce(), 2.0)
    assert measure(trainer, make_rows()) == cool


def test_unusable_rows_are_counted_with_their_reason(model, kit):
    rows = make_rows()
    found = measure(kit.make_trainer(model), [rows[0], None, ([1] * 30, [2] * 30), rows[3]])
    assert found.dropped == ((1, "bad_row"), (2, "prompt_too_long"))
    assert (found.num_rows, found.num_units) == (2, 55)
    nothing = measure(kit.make_trainer(model), [None])
    assert (nothing.num_rows, nothing.num_units, nothing.loss) == (0, 0, 0.0)


def check_replicas_share_the_rows_evenly_and_agree(model, kit, number):
    rows = make_rows(number)
    alone = measure(kit.make_trainer(model), rows)
    trainers = [kit.make_trainer(model) for _ in range(2)]

    def work(group):
        trainer = trainers[group.rank]
        share = reader_of(trainer, rows).heldout(len(rows), group)
        lengths = [sum(array.shape[0] for array in each.payload.arrays.values()) for each in share.sequences]
        return measure(trainer, rows, group), share, sum(lengths)

    (first, share, units), (second, other, others) = members(work)
    assert first == second
    assert first.loss == pytest.approx(alone.loss, abs=1e-6)
    assert (first.num_rows, first.num_units) == (number, alone.num_units)
    assert share.counts + other.counts == reader_of(trainers[0], rows).heldout(len(rows), solo()).counts
    if number > 1:
        assert abs(units - others) <= 2
    else:
        assert (len(share.sequences), len(other.sequences)) == (1, 0)


def test_replicas_share_the_rows_evenly_and_agree(model, kit):
    for number in [9, 1]:
        check_replicas_share_the_rows_evenly_and_agree(model, kit, number)


def in_a_world(mesh, rows):
    """The loss as each process of a replica finds it."""
    torch.set_num_threads(1)
    axes = MeshConfig(**mesh)
    world = World(form_mesh(axes, "cpu"))
    with tempfile.TemporaryDirectory() as folder:
        model = HuggingFaceModel(
            HuggingFaceOptions(), ModelContext(path=None, config=QWEN3, assets=Path(folder) / "assets")
        )
        policy = PolicyConfig(precision="fp32", micro_batch_units=48, mesh=axes)
        module = model.build(seed=0, dtype=torch.float32, device=CPU, layout=layout_of(policy, world.mesh, "cpu"))
        trainer = Trainer(model=model, module=module, policy=policy, device=CPU, world=world)
    found = measure(trainer, rows, solo(world=world))
    return found.loss, found.num_units, found.num_rows


def test_the_processes_of_a_replica_share_the_rows_and_agree():
    rows = make_rows()
    ((loss, *counts),) = run_world(1, in_a_world, {}, rows)
    for axes in ({"dp_shard": 2}, {"cp": 2}, {"pp": 2}):
        for found, *others in run_world(2, in_a_world, axes, rows):
            assert found == pytest.approx(loss, abs=1e-6), axes
            assert others == counts, axes


def step(measures, *, number):
    groups = tuple(GroupRef(position=row, row=row) for row in range(number))
    shares = (tuple(range(number)),)
    return TrainOrder(step=1, attempt=1, stage=0, groups=groups, shares=shares, publish=False, measures=measures)


def check_a_step_measures_what_its_order_asks_for(model, kit, measures):
    rows, train = make_rows(), make_rows(4, seed=1)
    trainer, twin = kit.make_trainer(model), kit.make_trainer(model)
    runner = StepRunner(trainer=trainer, reader=reader_of(trainer, rows, train), num_heldout=5)
    done = runner.run(step(measures, number=4), solo(), lambda: None, 0.0)
    assert [found.version for found in done.heldout] == list(measures)
    assert all(found.num_rows == 5 for found in done.heldout)
    assert ("heldout_s" in done.metrics) == bool(measures)
    if 0 in measures:
        assert done.heldout[0] == measure(twin, rows[:5])
    if 1 in measures:
        assert done.heldout[-1] == measure(trainer, rows[:5])


def test_a_step_measures_what_its_order_asks_for(model, kit):
    for measures in [(), (0,), (1,), (0, 1)]:
        check_a_step_measures_what_its_order_asks_for(model, kit, measures)


def test_a_group_that_breaks_after_the_step_costs_only_the_loss(model, kit, monkeypatch):
    trainer = kit.make_trainer(model)
    runner = StepRunner(trainer=trainer, reader=reader_of(trainer, make_rows(), make_rows(4)), num_heldout=5)
    whole = ShareReader.heldout

    def heldout(reader, number, group):
        if trainer.step == 1:
            raise GradientGroupError("a member was lost")
        return whole(reader, number, group)

    monkeypatch.setattr(ShareReader, "heldout", heldout)
    done = runner.run(step((0, 1), number=4), solo(), lambda: None, 0.0)
    assert isinstance(done, StepDone)
    assert trainer.step == 1
    assert [(type(found), found.version) for found in done.heldout] == [(HeldOutLoss, 0)]


def test_demonstrations_of_a_step_are_shared_evenly_whatever_the_order_says(model, kit):
    train = make_rows()
    trainers = [kit.make_trainer(model) for _ in range(2)]
    order = step((), number=9)

    def work(group):
        reader = reader_of(trainers[group.rank], [], train)
        share = reader.read(order, group, trainers[group.rank].algorithm)
        return share.counts, share.dropped

    (first, _), (second, _) = members(work)
    assert first.trained + second.trained == 9
    assert abs(first.decisions + first.prompt_units - second.decisions - second.prompt_units) <= 2
