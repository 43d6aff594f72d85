"""The replica against a scripted controller."""

import gzip
import json
import threading
from collections import Counter

import attrs
import pytest
import torch

from cosmos_core.config.schema import AverageConfig
from cosmos_core.policy.batches.share import ShareReader
from cosmos_core.policy.checkpoints.checkpoint import Place, completed, marker, read_place
from cosmos_core.policy.checkpoints.reader import restore
from cosmos_core.policy.checkpoints.saver import CheckpointSaver
from cosmos_core.policy.orders import LeaderOrders
from cosmos_core.policy.processes.group import GradientGroupError
from cosmos_core.policy.processes.rendezvous import GroupStore
from cosmos_core.policy.publication import Publications
from cosmos_core.policy.replica import UNKNOWN_STEP, PolicyReplica, UnitRate, make_turns, transfer_state
from cosmos_core.policy.training.step import StepRunner
from cosmos_core.replica.health_channel import HealthChannel
from cosmos_core.replica.profiler import Profiler
from cosmos_core.replica.turns import RoleLock
from cosmos_core.transport.directives import GenerationOrder, GroupRef, PolicyDirective, ProfileOrder, TrainOrder
from cosmos_core.transport.messages import Directive
from cosmos_core.transport.reports import (
    CheckpointSaved,
    GenerationFailed,
    GenerationFormed,
    Left,
    Profiled,
    Slept,
    StepDone,
    WeightsPublished,
)
from cosmos_core.types import Sample, SampleStatus
from cosmos_core.weights.digest import digest_of
from cosmos_core.weights.publisher import WeightPublisher
from tests.merging import published


class Script:
    """A controller's line: directives one after another, each once what it waits for was reported."""

    def __init__(self, *stages):
        self.stages = list(stages)
        self.reports = []
        self.revision = 0
        self.step = 0
        self.adopted = []
        self.changed = threading.Condition()

    def report(self, report):
        with self.changed:
            self.reports.append(report)
            self.changed.notify_all()

    def of(self, kind):
        return [report for report in self.reports if isinstance(report, kind)]

    def set_step(self, step):
        self.step = step

    def wait_directive(self, after, timeout_s):
        with self.changed:
            self.changed.wait_for(lambda: self.stages and self.stages[0][0](self), timeout_s)
            if not self.stages or not self.stages[0][0](self):
                return None
            self.revision += 1
            return Directive(term=1, revision=self.revision, acknowledged=0, policy=self.stages.pop(0)[1])


def when(kind=None, number=1):
    return lambda script: kind is None or len(script.of(kind)) >= number


def generation(number, *members, store="", source=0, transfer=False):
    return GenerationOrder(
        generation=number, members=members or ("policy-0",), store=store, source=source, transfer=transfer
    )


def directive(gen=None, train=None, *, publish=-1, checkpoint=-1, **more):
    return PolicyDirective(
        generation=gen, train=train, publish=publish, retain=-1, checkpoint=checkpoint, **{"stop": False, **more}
    )


STOP = directive(stop=True)


@pytest.fixture
def work(kit):
    sequences = kit.random_sequences(4)
    held = {lease: [s.payload] for lease, s in enumerate(sequences)}
    groups = tuple(
        GroupRef(
            position=lease,
            row=lease,
            lease=lease,
            endpoint="tcp://a:1",
            samples=(
                Sample(
                    index=0,
                    status=SampleStatus.OK,
                    reward=s.advantage,
                    rewards={},
                    oldest_version=0,
                    newest_version=0,
                    num_units=s.payload.arrays["completion"].shape[0],
                    num_prompt_units=s.payload.arrays["prompt"].shape[0],
                ),
            ),
        )
        for lease, s in enumerate(sequences)
    )
    return groups, held


class Payloads:
    def __init__(self, held):
        self.held = held

    def fetch(self, requests, timeout_s):
        return {lease: self.held[lease] for leases in requests.values() for lease in leases}


def order(groups, step, *, shares=None, attempt=1, stage=0, publish=False):
    return TrainOrder(
        step=step,
        attempt=attempt,
        stage=stage,
        groups=groups,
        shares=shares or (tuple(range(len(groups))),),
        publish=publish,
    )


def run(kit, model, script, held, tmp_path, *, name="policy-0", seed=0, stop=None, lock=None, **policy):
    trainer = kit.make_trainer(model, seed=seed, **policy)
    with WeightPublisher("run", "127.0.0.1", directory=tmp_path / f"shm-{name}") as publisher:
        replica = PolicyReplica(
            name=name,
            run_id="run",
            address="127.0.0.1",
            orders=LeaderOrders(script, trainer.world, HealthChannel(), stop or threading.Event()),
            trainer=trainer,
            runner=StepRunner(
                trainer=trainer,
                reader=ShareReader(
                    model=model, payloads=Payloads(held), dataset=None, longest=100, world=trainer.world
                ),
            ),
            publications=Publications(publisher, torch.float32, script.report),
            saver=CheckpointSaver(str(tmp_path / "checkpoints"), 2, script.report),
            begin_stage=lambda index: trainer.begin_stage(kit.stage_of(index=index), kit.Reinforce(), 1.0),
            restore=lambda path: restore(
                trainer, path, lambda index: trainer.begin_stage(kit.stage_of(index=index), kit.Reinforce(), 1.0)
            ),
            adopt=script.adopted.append,
            profiler=Profiler(tmp_path, name, script.report),
            turns=None if lock is None else make_turns(lock, trainer, tmp_path),
        )
        replica.run()
    return trainer


@pytest.fixture(autouse=True)
def folders(tmp_path):
    for name in ("policy-0", "policy-1"):
        (tmp_path / f"shm-{name}").mkdir()


def test_a_short_life(kit, model, work, tmp_path, caplog):
    caplog.set_level("INFO", logger="cosmos_core.policy.replica")
    groups, held = work
    gen = generation(1)
    traced = ProfileOrder(ident="asked", first=2, steps=2, ranks=(0,))
    script = Script(
        (when(), directive(gen, publish=0)),
        (when(GenerationFormed), directive(gen, order(groups, 1), publish=0)),
        (when(StepDone), directive(gen, order(groups, 2, publish=True), publish=0, profile=traced)),
        (when(StepDone, 2), directive(gen, checkpoint=2, publish=2, profile=traced)),
        (when(CheckpointSaved), STOP),
    )
    trainer = run(kit, model, script, held, tmp_path)
    assert [report.step for report in script.of(StepDone)] == [1, 2]
    assert script.of(GenerationFormed) == [GenerationFormed(generation=1, step=0)]
    assert [report.version for report in script.of(WeightsPublished)] == [0, 2]
    assert len({report.digest for report in script.of(WeightsPublished)}) == 2
    assert completed(str(tmp_path / "checkpoints"))[-1] == 2
    assert trainer.step == script.step == 2
    assert "generation 1: replica 0 of 1" in caplog.messages
    (profiled,) = script.of(Profiled)
    assert "before it had done so many steps" in profiled.problem
    with gzip.open(tmp_path / profiled.traces[0]) as file:
        names = Counter(event["name"] for event in json.load(file)["traceEvents"])
    assert names["forward_backward"] == names["publish"] == 1
    assert names["forward"] == names["backward"] >= 1


def test_who_slept_goes_on_as_if_it_had_not(kit, model, work, tmp_path):
    groups, held = work
    gen, trained = generation(1), []
    for sleeps in (False, True):
        asleep = [(when(StepDone), directive(gen, publish=1, turn=1, sleep=True)), (when(Slept, 2), directive(gen))]
        script = Script(
            (when(), directive(gen, turn=0, sleep=sleeps)),
            *([(when(Slept), directive(gen))] if sleeps else []),
            (when(GenerationFormed), directive(gen, order(groups, 1))),
            *(asleep if sleeps else []),
            (when(StepDone), directive(gen, order(groups, 2), turn=2)),
            (when(StepDone, 2), STOP),
        )
        with RoleLock(tmp_path, "policy", "p") as lock:
            lock.acquire()
            given = lock if sleeps else None
            trainer = run(kit, model, script, held, tmp_path, lock=given, average=AverageConfig(decay=0.9))
        trained.append(digest_of(trainer.state()))
        assert [report.turn for report in script.of(Slept)] == ([0, 1] if sleeps else [])
        assert [report.version for report in script.of(WeightsPublished)] == ([1] if sleeps else [])
    assert trained[0] == trained[1]


@pytest.mark.parametrize("publish", [False, True])
def test_what_is_published_is_attested(kit, model, work, tmp_path, publish):
    groups, held = work
    script = Script(
        (when(), directive(generation(1), publish=0)),
        (when(GenerationFormed), directive(generation(1), order(groups, 1, publish=True), publish=0)),
        (when(WeightsPublished, 2), STOP),
    )
    trainer = run(kit, model, script, held, tmp_path, average=AverageConfig(decay=0.9, publish=publish))
    own = published(trainer.module)
    state = trainer.state()
    digests = [digest_of(own), digest_of({name: state[f"average.{name}"] for name in own})]
    assert digests[0] != digests[1]
    assert script.of(WeightsPublished)[1].digest == digests[publish]


def test_each_step_goes_by_the_values_of_its_order(kit, model, work, tmp_path):
    groups, held = work
    gen = generation(1)
    changed = attrs.evolve(order(groups, 2), settings={"policy.optimizer.lr": 0.5})
    script = Script(
        (when(), directive(gen)),
        (when(GenerationFormed), directive(gen, order(groups, 1))),
        (when(StepDone), directive(gen, changed)),
        (when(StepDone, 2), STOP),
    )
    run(kit, model, script, held, tmp_path)
    assert script.adopted == [{}, {"policy.optimizer.lr": 0.5}]


def test_orders_that_are_repeated_are_done_once(kit, model, work, tmp_path):
    groups, held = work
    gen = generation(1)
    script = Script(
        (when(), directive(gen)),
        (when(GenerationFormed), directive(gen, order(groups, 1), publish=1)),
        (when(StepDone), directive(gen, order(groups, 1), publish=1, checkpoint=1)),
        (when(CheckpointSaved), directive(gen, order(groups, 1), publish=1, checkpoint=1)),
        (when(CheckpointSaved), directive(gen, order(groups, 5))),
        (when(CheckpointSaved), STOP),
    )
    assert run(kit, model, script, held, tmp_path).step == 1
    assert len(script.of(StepDone)) == len(script.of(CheckpointSaved)) == len(script.of(WeightsPublished)) == 1


def test_a_step_that_was_applied_is_answered_for_a_new_attempt(kit, model, work, tmp_path):
    """Its generation broke after the gradients were reduced: done is done."""
    groups, held = work
    script = Script(
        (when(), directive(generation(1))),
        (when(GenerationFormed), directive(generation(1), order(groups, 1))),
        (when(StepDone), directive(generation(2), order(groups, 1, attempt=2))),
        (when(StepDone, 2), STOP),
    )
    assert run(kit, model, script, held, tmp_path).step == 1
    first, second = script.of(StepDone)
    assert (second.attempt, second.generation) == (2, 2)
    assert second.metrics == first.metrics


def test_a_new_stage_is_taken_up_with_its_first_order(kit, model, work, tmp_path):
    groups, held = work
    gen = generation(1)
    script = Script(
        (when(), directive(gen)),
        (when(GenerationFormed), directive(gen, order(groups, 1, stage=1))),
        (when(StepDone), STOP),
    )
    assert run(kit, model, script, held, tmp_path).stage.index == 1


def test_an_older_generation_is_ignored_and_a_replica_left_out_trains_nothing(kit, model, work, tmp_path):
    groups, held = work
    ready = threading.Event()
    script = Script(
        (when(), directive(generation(3))),
        (when(GenerationFormed), directive(generation(2), order(groups, 1))),
        (when(StepDone), directive(generation(4, "someone"), order(groups, 2))),
        (lambda _: ready.set() or True, STOP),
    )
    run(kit, model, script, held, tmp_path)
    assert ready.is_set()
    assert [report.generation for report in script.of(GenerationFormed)] == [3]
    assert [report.step for report in script.of(StepDone)] == [1]


def test_the_process_can_be_stopped_at_any_time(kit, model, tmp_path):
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    run(kit, model, Script(), {}, tmp_path, stop=stop)


def test_two_replicas_one_joins_late(kit, model, work, tmp_path):
    """Alone at first; the second has other weights, takes the first's state, and both end with the same bits."""
    groups, held = work
    store = GroupStore("127.0.0.1")
    one = generation(1)
    both = generation(2, "policy-0", "policy-1", store=store.endpoint, transfer=True)
    shares = ((0, 1), (2, 3))
    scripts = [
        Script(
            (when(), directive(one)),
            (when(GenerationFormed), directive(one, order(groups, 1))),
            (when(StepDone), directive(both)),
            (when(GenerationFormed, 2), directive(both, order(groups, 2, shares=shares))),
            (when(StepDone, 2), directive(both, checkpoint=2)),
            (when(CheckpointSaved), STOP),
        ),
        Script(
            (when(), directive(both)),
            (when(GenerationFormed), directive(both, order(groups, 2, shares=shares))),
            (when(StepDone), directive(both, checkpoint=2)),
            (when(StepDone), STOP),
        ),
    ]
    trainers = [None, None]

    def live(index):
        torch.set_num_threads(1)
        name = f"policy-{index}"
        trainers[index] = run(kit, model, scripts[index], held, tmp_path, name=name, seed=index)

    threads = [threading.Thread(target=live, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [report.step for report in scripts[1].of(GenerationFormed)] == [1]
    first, second = (trainer.state() for trainer in trainers)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    # The first member writes for all.
    assert not scripts[1].of(CheckpointSaved)


def test_a_newer_generation_ends_the_wait_for_a_lost_member(kit, model, work, tmp_path):
    groups, held = work
    store = GroupStore("127.0.0.1")
    asked = []

    def after_a_while(script):
        asked.append(1)
        return len(asked) > 3

    script = Script(
        (when(), directive(generation(1, "policy-0", "lost", store=store.endpoint))),
        (after_a_while, directive(generation(2), order(groups, 1))),
        (when(StepDone), STOP),
    )
    assert run(kit, model, script, held, tmp_path).step == 1
    (failed,) = script.of(GenerationFailed)
    assert failed.generation == 1
    assert "interrupted" in failed.reason


def test_a_transfer_that_breaks_off_leaves_no_state_to_train_on(kit, model, tmp_path):
    """Half the tensors are another step's: under the old step it would train on, and nobody could tell."""

    class Breaking:
        rank, size = 0, 2

        def exchange(self, data):
            return [data, json.dumps([7, 0, 0, 0]).encode()]

        def copy(self, tensors, source):
            raise GradientGroupError("the source is gone")

    trainer = kit.make_trainer(model)
    with pytest.raises(GradientGroupError):
        transfer_state(trainer, Breaking(), 1, lambda index: None)
    assert trainer.step == UNKNOWN_STEP
    source = kit.make_trainer(model)
    with pytest.raises(GradientGroupError):
        transfer_state(source, Breaking(), 0, lambda index: None)
    assert source.step == 0


def test_a_gpu_that_fails_in_a_collective_is_told_and_ends_the_replica(kit, model, work, tmp_path, monkeypatch):
    def fail(*_):
        cause = RuntimeError("NCCL error: unhandled cuda error\nCuda failure 214 'uncorrectable ECC error encountered'")
        raise GradientGroupError("generation 1: a collective failed: NCCL error") from cause

    monkeypatch.setattr(StepRunner, "run", fail)
    groups, held = work
    script = Script((when(), directive(generation(1))), (when(GenerationFormed), directive(None, order(groups, 1))))
    with pytest.raises(GradientGroupError):
        run(kit, model, script, held, tmp_path)
    assert not script.of(GenerationFailed)


def test_nothing_is_saved_or_trained_of_an_unknown_state(kit, model, work, tmp_path):
    groups, held = work
    script = Script(
        (when(), directive(generation(1))),
        (when(GenerationFormed), directive(generation(1), order(groups, 1), checkpoint=-1)),
        (when(GenerationFormed), STOP),
    )
    begin = kit.make_trainer

    def unknown(*args, **options):
        trainer = begin(*args, **options)
        trainer.step = UNKNOWN_STEP
        return trainer

    kit.make_trainer = unknown
    assert run(kit, model, script, held, tmp_path).step == UNKNOWN_STEP
    assert script.of(GenerationFormed) == [GenerationFormed(generation=1, step=UNKNOWN_STEP)]
    assert not script.of(StepDone)
    assert completed(str(tmp_path / "checkpoints")) == []


def test_checkpoints_of_steps_that_were_undone_are_removed_before_training_goes_on(kit, model, work, tmp_path, caplog):
    groups, held = work
    for step, made_by in ((1, 3), (6, 3), (8, 5)):
        folder = tmp_path / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        place = Place(run_id="run", step=step, stage=0, nonfinite_steps=0, generation=made_by)
        (folder / "complete.json").write_bytes(marker(place))
    found = []
    gen = attrs.evolve(generation(4), step=1)
    script = Script(
        (when(), directive(gen)),
        (when(GenerationFormed), directive(gen, order(groups, 1))),
        (when(StepDone), directive(gen, checkpoint=1)),
        (when(CheckpointSaved), STOP),
    )
    report = script.report
    script.report = lambda said: (found.append(completed(str(tmp_path / "checkpoints"))), report(said))
    run(kit, model, script, held, tmp_path)
    assert found[0] == [1, 8]
    assert "removed the checkpoints of steps [6], which were undone" in caplog.text
    assert read_place(str(tmp_path / "checkpoints" / "step-1")).generation == 4


def test_a_checkpoint_says_how_many_steps_in_a_row_had_nothing_to_learn_from(kit, model, work, tmp_path):
    _, held = work
    gen = generation(1)
    script = Script(
        (when(), directive(gen)),
        (when(GenerationFormed), directive(gen, checkpoint=0)),
        (when(CheckpointSaved), STOP),
    )
    make = kit.make_trainer

    def counting(*args, **options):
        trainer = make(*args, **options)
        trainer.nonfinite_steps, trainer.unimitated_steps = 2, 7
        return trainer

    kit.make_trainer = counting
    run(kit, model, script, held, tmp_path)
    place = read_place(str(tmp_path / "checkpoints" / "step-0"))
    assert (place.nonfinite_steps, place.unimitated_steps) == (2, 7)


def test_a_checkpoint_that_cannot_be_removed_is_told(kit, model, work, tmp_path, caplog):
    _, held = work
    (tmp_path / "checkpoints" / "step-6" / "complete.json").mkdir(parents=True)
    script = Script((when(), directive(generation(1))), (when(GenerationFormed), STOP))
    run(kit, model, script, held, tmp_path)
    assert "checkpoints of steps after 0, which were undone, may not all be removed" in caplog.text


def test_gauges(kit, model):
    trainer = kit.make_trainer(model)
    rate = UnitRate(trainer)
    trainer.num_units = 100
    trainer.step = 7
    gauges = rate()
    assert gauges["step"] == 7
    assert gauges["tokens_per_s"] > 0
    assert rate()["tokens_per_s"] == 0.0


def test_one_that_does_not_hold_the_weights_loads_the_checkpoint_first(kit, model, work, tmp_path):
    groups, held = work
    gen = generation(1)
    first = Script(
        (when(), directive(gen)),
        (when(GenerationFormed), directive(gen, order(groups, 1))),
        (when(StepDone), directive(gen, checkpoint=1)),
        (when(CheckpointSaved), STOP),
    )
    trained = run(kit, model, first, held, tmp_path)
    (saved,) = first.of(CheckpointSaved)
    again = attrs.evolve(generation(2), step=1, checkpoint=saved.path)
    second = Script(
        (when(), directive(again)),
        (when(GenerationFormed), directive(again, order(groups, 2))),
        (when(StepDone), STOP),
    )
    other = run(kit, model, second, held, tmp_path, name="policy-0", seed=7)
    assert second.of(GenerationFormed) == [GenerationFormed(generation=2, step=1)]
    assert other.step == 2
    expected = run(
        kit,
        model,
        Script(
            (when(), directive(gen)),
            (when(GenerationFormed), directive(gen, order(groups, 1))),
            (when(StepDone), directive(gen, order(groups, 2))),
            (when(StepDone, 2), STOP),
        ),
        held,
        tmp_path,
    )
    assert trained.step == 1
    for name, tensor in expected.state().items():
        assert torch.equal(tensor, other.state()[name]), name


def test_one_that_is_told_to_leave_says_so_when_all_is_done(kit, model, work, tmp_path):
    groups, held = work
    gen = generation(1)
    leave = attrs.evolve(directive(None), leave=True)
    script = Script(
        (when(), directive(gen, publish=0)),
        (when(GenerationFormed), directive(gen, order(groups, 1, publish=True), publish=0)),
        (when(StepDone), directive(gen, checkpoint=1)),
        (when(StepDone), leave),
    )
    run(kit, model, script, held, tmp_path)
    assert script.reports[-1] == Left()
    assert len(script.of(CheckpointSaved)) == 1
    assert [report.version for report in script.of(WeightsPublished)] == [0, 1]
