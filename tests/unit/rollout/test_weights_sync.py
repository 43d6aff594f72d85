from __future__ import annotations

import contextlib
import re
import threading
import time
from types import SimpleNamespace

import attrs
import pytest
import torch

from cosmos_core.errors import WeightSyncError
from cosmos_core.rollout import weights_sync
from cosmos_core.rollout.embedded.engine import EmbeddedEngine
from cosmos_core.rollout.relay import Relay
from cosmos_core.rollout.version_lock import VersionLock
from cosmos_core.rollout.weights_sync import WeightSync
from cosmos_core.transport.directives import Relaying, WeightTarget
from cosmos_core.transport.reports import WeightsLoaded, WeightsRejected
from cosmos_core.weights import process_group, slices
from cosmos_core.weights.digest import digest_of, tensor_digests
from cosmos_core.weights.receiver import WeightReceiver


class Receiver:
    """Hands out the slices of given modules; can fail or corrupt the next fetches, or find them stored."""

    def __init__(self, modules):
        self.modules, self.faults, self.always, self.asked, self.falls_back = modules, [], None, [], []
        self.may_go_on = threading.Event()

    @contextlib.contextmanager
    def fetch(self, target, layout, timeout_s, *, falls_back, base=None, interrupted):
        assert base is None
        self.asked.append(target.sources)
        self.falls_back.append(falls_back)
        fault = self.faults.pop(0) if self.faults else self.always
        if fault == "fail":
            raise WeightSyncError("the source is gone")
        if fault == "wait":
            assert self.may_go_on.wait(10)
        if fault == "silence":
            wait_until(interrupted)
            raise WeightSyncError("no answer")
        tensors = dict(self.modules[target.version].named_parameters())

        def pieces():
            for piece, _ in layout[0]:
                data = tensors[piece.name].detach()
                if fault != "lack":
                    yield 0, piece, data + 1 if fault == "corrupt" else data
                if fault == "stop":
                    raise WeightSyncError("the source ended half-way")

        yield Pieces(tensor_digests(tensors), pieces(), is_stored=fault == "stored")


class Pieces:
    def __init__(self, digests, pieces, *, is_stored):
        self.digests, self.pieces, self.is_stored, self.spared, self.num_whole = digests, pieces, is_stored, 0, 0

    def __iter__(self):
        return self.pieces


class Rig:
    def __init__(self, kit, engine, in_flight_update=True):
        self.engine, self.version_lock, self.reports = engine, VersionLock(), []
        self.modules = {version: kit.reference(seed=version + 1) for version in range(4)}
        self.receiver, self.arrived = Receiver(self.modules), threading.Condition()
        self.relay = Relay("run")
        self.sync = WeightSync(
            engine,
            self.receiver,
            self.version_lock,
            cache="keep",
            in_flight_update=in_flight_update,
            report=self.report,
            relay=self.relay,
            relay_timeout_s=5.0,
            patience_s=10.0,
        )

    def report(self, report):
        with self.arrived:
            self.reports.append(report)
            self.arrived.notify_all()

    def wait(self, number):
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.reports) >= number, 10)
        return self.reports[number - 1]

    def target(self, version, source="policy"):
        digest = digest_of(dict(self.modules[version].named_parameters()))
        return WeightTarget(version=version, digest=digest, sources=(source,), hosts=("here",))


@pytest.fixture
def rig(kit, engine):
    made = Rig(kit, engine)
    made.sync.start()
    yield made
    made.sync.close()
    made.relay.close()


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(weights_sync, "_RETRY_S", (0.02,))


def generates(kit, rig, version):
    generated = rig.engine.submit([kit.request("probe", [4, 5], max_units=2)])[0].result(5)[0]
    return set(kit.versions(generated)) == {version}


def test_each_new_target_is_loaded_attested_and_reported(kit, rig):
    for number, version in enumerate((0, 1, 3), 1):
        rig.sync.aim(rig.target(version))
        loaded = rig.wait(number)
        assert isinstance(loaded, WeightsLoaded)
        assert (loaded.version, loaded.digest) == (version, rig.target(version).digest)
        assert loaded.nbytes == sum(p.nbytes for p in rig.modules[version].parameters())
        assert loaded.transfer_s > 0
        assert loaded.paused_s > 0
        assert rig.version_lock.loaded == version
        assert generates(kit, rig, version)
    rig.sync.aim(rig.target(3))
    rig.sync.aim(rig.target(2))
    assert generates(kit, rig, 3)
    assert len(rig.reports) == 3
    rig.sync.check()


def test_a_failed_transfer_is_repeated_while_the_old_weights_serve(kit, rig):
    rig.receiver.faults = ["fail", "stop"]
    rig.sync.aim(rig.target(1))
    assert rig.wait(1).version == 1
    assert generates(kit, rig, 1)


def test_weights_with_another_digest_are_never_served(kit, rig):
    rig.receiver.faults = ["corrupt", "wait"]
    resumed = []
    resume = rig.engine.resume
    rig.engine.resume = lambda: (resumed.append(len(rig.reports)), resume())
    rig.sync.aim(rig.target(1))
    rejected = rig.wait(1)
    assert isinstance(rejected, WeightsRejected)
    assert rejected.expected == rig.target(1).digest != rejected.digest
    assert rig.version_lock.loaded == -1
    held = rig.engine.submit([kit.request("held", [4, 5], max_units=2)])[0]
    rig.receiver.may_go_on.set()
    assert isinstance(rig.wait(2), WeightsLoaded)
    assert resumed == [1]
    generated = held.result(5)[0]
    expected = kit.plain_logprobs(rig.modules[1], [4, 5], kit.completion(generated))
    torch.testing.assert_close(torch.tensor(kit.logprobs(generated)), torch.tensor(expected), atol=1e-5, rtol=0)


def test_no_update_while_an_evaluation_runs(kit, rig):
    rig.sync.aim(rig.target(1))
    rig.wait(1)
    assert rig.version_lock.enter(1)
    rig.sync.aim(rig.target(2))
    assert generates(kit, rig, 1)
    assert len(rig.reports) == 1
    rig.version_lock.leave()
    assert rig.wait(2).version == 2


def wait_until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def gave_up(rig):
    try:
        rig.sync.check()
    except WeightSyncError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("fail", "the source is gone"), ("corrupt", "embed_tokens.weight: what arrived is not what was published")],
)
def test_a_version_that_never_loads_ends_the_replica_and_says_why(rig, fault, reason):
    rig.sync._patience_s = 0.2
    rig.receiver.always = fault
    rig.sync.aim(rig.target(1))
    wait_until(lambda: gave_up(rig))
    assert re.search(rf"version 1 could not be loaded in \d+ attempts.*{reason}", gave_up(rig))


def let_one_fail(rig, source):
    """Wait for the end of an attempt to read from a source that has not begun yet."""
    asked = rig.receiver.asked
    following = asked.count((source,)) + 2
    wait_until(lambda: asked.count((source,)) >= following or gave_up(rig))
    assert not gave_up(rig)


def test_patience_begins_anew_with_each_version(rig, monkeypatch):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(weights_sync, "time", clock)
    rig.receiver.always = "fail"
    for version in (1, 2, 3):
        source = f"of version {version}"
        rig.sync.aim(rig.target(version, source))
        let_one_fail(rig, source)
        clock.now += 6.0  # of the 10 s that each may take
        let_one_fail(rig, source)
    rig.receiver.always = None
    assert rig.wait(1).version == 3


@pytest.mark.parametrize("is_whole", [True, False])
def test_the_engine_is_blamed_only_if_all_that_arrived_was_checked(rig, is_whole):
    layout, commit = rig.engine.layout(), rig.engine.commit_update
    piece, dtype = layout[0][0]
    if not is_whole:
        # Another rank's part, which no other completes.
        layout = {**layout, 1: [(attrs.evolve(piece, shape=(1, *piece.shape[1:])), dtype)]}
    rig.engine.layout = lambda: layout
    rig.engine.commit_update = lambda cache: commit(cache)[:0]
    rig.sync.aim(rig.target(1))
    assert "arrived" not in rig.wait(1).reason
    wait_until(lambda: len(rig.reports) >= 2)
    blames = "all that arrived was right, so that it went wrong in the engine" in rig.reports[1].reason
    assert blames == is_whole
    assert ("could not be checked of 1 tensors" in rig.reports[1].reason) != is_whole
    assert (f"the first is {piece.name}" in rig.reports[1].reason) != is_whole


def test_an_update_that_was_not_copied_lets_the_old_weights_serve_on(kit, rig):
    rig.sync.aim(rig.target(1))
    rig.wait(1)
    rig.sync._patience_s = 0.2
    rig.receiver.always = "lack"
    rig.sync.aim(rig.target(2))
    wait_until(lambda: gave_up(rig))
    assert "not wholly written" in gave_up(rig)
    assert generates(kit, rig, 1)
    assert rig.version_lock.enter(1)


def test_no_evaluation_enters_after_a_wrong_digest(rig):
    rig.sync.aim(rig.target(1))
    rig.wait(1)
    rig.receiver.always = "corrupt"
    rig.sync.aim(rig.target(2))
    rig.wait(2)
    assert not rig.version_lock.enter(1)


@pytest.mark.parametrize(("in_flight_update", "versions"), [(True, {0, 1}), (False, {0})])
def test_an_engine_without_updates_in_flight_finishes_first(kit, engine, in_flight_update, versions, monkeypatch):
    rig, step, is_in_flight = Rig(kit, engine, in_flight_update), EmbeddedEngine._step, threading.Event()

    def stepped(engine):
        step(engine)
        if engine.stats().generated_units == 3:
            is_in_flight.set()
            # The next command is the pause: however late it comes, it finds the request unfinished.
            wait_until(lambda: not engine._commands._queue.empty())

    monkeypatch.setattr(EmbeddedEngine, "_step", stepped)
    rig.sync.start()
    try:
        rig.sync.aim(rig.target(0))
        rig.wait(1)
        (handle,) = engine.submit([kit.request("long", [4, 5], max_units=40)])
        assert is_in_flight.wait(20)
        rig.sync.aim(rig.target(1))
        rig.wait(2)
        assert set(kit.versions(handle.result(10)[0])) == versions
        assert generates(kit, rig, 1)
    finally:
        rig.sync.close()


def test_a_replica_waits_for_its_parent_and_then_reads_from_it(kit, rig):
    below = Relaying(level=2, reserve=rig.target(1))
    rig.sync.aim(None, below)
    time.sleep(0.2)  # less than the 5 s for each of two replicas above it
    assert rig.receiver.asked == []
    rig.sync.aim(rig.target(1, "parent"), below)
    loaded = rig.wait(1)
    assert rig.receiver.asked == [("parent",)]
    assert loaded.relayed == loaded.nbytes > 0
    assert loaded.endpoint == ""
    assert generates(kit, rig, 1)


def test_a_replica_whose_parent_is_too_slow_reads_from_the_policy(rig, caplog):
    rig.sync._relay_timeout_s = 0.2
    began = time.monotonic()
    rig.sync.aim(None, Relaying(level=2, reserve=rig.target(1)))
    loaded = rig.wait(1)
    assert time.monotonic() - began > 0.4
    assert (loaded.version, loaded.relayed, rig.receiver.asked) == (1, 0, [("policy",)])
    assert "version 1 are read from the policy itself: no replica passed them on in time" in caplog.text
    # With the next version it waits anew.
    rig.sync.aim(rig.target(2, "parent"), Relaying(level=2, reserve=rig.target(3)))
    assert rig.wait(2).version == 2
    assert rig.receiver.asked[1:] == [("parent",)]


@pytest.mark.parametrize("fault", ["fail", "stop", "corrupt"])
def test_a_replica_whose_parent_fails_reads_from_the_policy(rig, fault):
    rig.receiver.faults = [fault]
    rig.sync.aim(rig.target(1, "parent"), Relaying(level=1, reserve=rig.target(1)))
    wait_until(lambda: any(isinstance(report, WeightsLoaded) for report in rig.reports))
    assert rig.receiver.asked == [("parent",), ("policy",)]
    assert rig.reports[-1].relayed == 0
    # One failure is no reason to stay away from the next version.
    rig.sync.aim(rig.target(2, "parent"), Relaying(level=1, reserve=rig.target(2)))
    wait_until(lambda: rig.version_lock.loaded == 2)
    assert rig.receiver.asked[2:] == [("parent",)]


def test_a_parent_that_was_passed_over_is_no_relay(rig):
    rig.sync.aim(rig.target(1), Relaying(level=1, reserve=rig.target(1)))
    assert rig.wait(1).relayed == 0


def test_what_is_passed_on_when_the_policy_has_it_no_more_counts_as_relayed(rig):
    rig.sync.aim(rig.target(1, "parent"), Relaying(level=1))
    assert rig.wait(1).relayed == rig.reports[0].nbytes


def test_the_policy_is_asked_before_what_is_stored_and_that_does_not_count_as_relayed(rig):
    rig.receiver.faults = ["fail", "stored"]
    rig.sync.aim(rig.target(1, "parent"), Relaying(level=1, reserve=rig.target(1)))
    assert rig.wait(1).relayed == 0
    assert rig.receiver.asked == [("parent",), ("policy",)]
    assert rig.receiver.falls_back == [False, True]
    # The policy has it no more: what is stored is all there is besides the parent.
    rig.receiver.faults = ["stored"]
    rig.sync.aim(rig.target(2, "parent"), Relaying(level=1))
    assert rig.wait(2).relayed == 0
    assert rig.receiver.falls_back[2:] == [True]


def test_no_pause_within_a_fetch_makes_a_receiver_count_as_gone():
    assert process_group.IDLE_S > weights_sync._TIMEOUT_S


def test_a_relay_keeps_what_it_loaded_and_says_where(rig):
    rig.sync.aim(rig.target(1), Relaying(keep=True, retain=1))
    endpoint = rig.wait(1).endpoint
    assert endpoint.startswith("tcp://")
    passed = attrs.evolve(rig.target(1), sources=(endpoint,))
    with (
        WeightReceiver("zmq", run_id="run", host="here") as receiver,
        receiver.fetch(passed, rig.engine.layout(), 5.0) as pieces,
    ):
        weights = dict(rig.modules[1].named_parameters())
        assert all(
            torch.equal(data, weights[piece.name][slices.within(piece, whole)])
            for _, piece, data in pieces
            for whole in [slices.whole(piece.name, tuple(weights[piece.name].shape))]
        )
    rig.receiver.faults = ["corrupt"]
    rig.sync.aim(rig.target(2), Relaying(keep=True, retain=2))
    rejected = rig.wait(2)
    assert isinstance(rejected, WeightsRejected)
    assert rig.wait(3).endpoint == endpoint
    rig.sync.aim(rig.target(2), Relaying(retain=3))
    assert rig.relay._publisher is None


def test_weights_of_steps_that_were_undone_are_given_up(kit, rig):
    """The run was taken back to step 1: version 3 comes again, with other weights."""
    rig.sync.aim(rig.target(3))
    rig.wait(1)
    rig.sync.aim(None, rollbacks=(1,))
    assert rig.version_lock.loaded == -1
    held = rig.engine.submit([kit.request("held", [4, 5], max_units=2)])[0]
    with pytest.raises(TimeoutError):
        held.result(0.2)
    rig.sync.aim(rig.target(1), rollbacks=(1,))
    assert rig.wait(2).version == 1
    assert set(kit.versions(held.result(5)[0])) == {1}
    rig.modules[3] = kit.reference(seed=99)
    rig.sync.aim(rig.target(3), rollbacks=(1,))
    assert rig.wait(3).digest == rig.target(3).digest
    assert generates(kit, rig, 3)


def test_weights_of_the_step_itself_stay(kit, rig):
    rig.sync.aim(rig.target(1))
    rig.wait(1)
    rig.sync.aim(None, rollbacks=(1,))
    assert rig.version_lock.loaded == 1
    assert generates(kit, rig, 1)
    rig.sync.aim(None, rollbacks=(1, 0))
    assert rig.version_lock.loaded == -1


def test_what_is_being_loaded_while_it_is_undone_is_not_served(kit, rig):
    write, told = rig.engine.write, threading.Event()

    def undo(rank, piece, data):
        if not told.is_set():
            rig.sync.aim(None, rollbacks=(1,))
            told.set()
        write(rank, piece, data)

    rig.engine.write = undo
    rig.sync.aim(rig.target(3))
    assert told.wait(10)
    rig.sync.aim(rig.target(1), rollbacks=(1,))
    assert rig.wait(1).version == 1
    assert rig.version_lock.loaded == 1
    rig.sync.check()


def test_what_was_taken_up_just_before_it_was_undone_is_not_served(rig, monkeypatch):
    """The run is taken back after the thread has taken its target, and before it begins to load it."""
    load = rig.sync._load

    def late(*given, **named):
        if given[0].version == 3:
            rig.sync.aim(None, rollbacks=(1,))
        load(*given, **named)

    monkeypatch.setattr(rig.sync, "_load", late)
    rig.sync.aim(rig.target(3))
    wait_until(lambda: rig.sync._rollbacks)
    rig.sync.aim(rig.target(1), rollbacks=(1,))
    assert rig.wait(1).version == 1
    assert rig.version_lock.loaded == 1


def test_copies_of_what_was_undone_are_not_passed_on(rig):
    for number, version in enumerate((1, 2), 1):
        rig.sync.aim(rig.target(version), Relaying(keep=True, retain=0))
        rig.wait(number)
    assert rig.relay._publisher.held == (1, 2)
    rig.sync.aim(None, Relaying(keep=True, retain=0), rollbacks=(1,))
    assert rig.relay._publisher.held == (1,)


def test_a_target_and_the_rollbacks_that_it_was_given_with_change_at_once(rig):
    """Otherwise the thread could take a target of before with the number of rollbacks of after."""
    seen = []

    class Watched(threading.Condition):
        def __enter__(self):
            seen.append(rig.sync._rollbacks)
            return super().__enter__()

    rig.sync.close()
    rig.sync._changed = Watched()
    rig.sync.aim(None, rollbacks=(1,))
    assert seen == [()]
    assert rig.sync._rollbacks == (1,)


def test_who_goes_to_sleep_waits_for_nothing_that_is_loaded_and_loads_nothing(kit, rig, caplog):
    rig.sync.aim(rig.target(1))
    rig.wait(1)
    rig.receiver.faults = ["silence"]
    rig.sync._patience_s = 0.0
    rig.sync.aim(rig.target(2))
    wait_until(lambda: rig.sync.loading == 2)
    rig.sync.rest()
    assert rig.version_lock.loaded == -1
    assert rig.sync.loading == -1
    rig.sync.rise()
    assert rig.wait(2).version == 2
    assert caplog.messages == []
    # An evaluation goes on, and keeps the next version out.
    assert rig.version_lock.enter(2)
    rig.sync.transfer_s = 0.0
    rig.sync.aim(rig.target(3))
    wait_until(lambda: rig.sync.transfer_s)
    time.sleep(0.05)
    rig.sync.rest()
    rig.version_lock.leave()
    following = rig.sync._next

    def then_rest(delay_s):
        found = following(delay_s)
        if found is not None and found[0].version == 2:
            rig.sync._next = following
            rig.sync.rest()
        return found

    rig.sync._next = then_rest
    rig.sync.rise()
    assert rig.wait(3).version == 3
    # Between what is to be loaded next and the load.
    rig.sync.aim(None, rollbacks=(2,))
    rig.sync.aim(rig.target(2), rollbacks=(2,))
    rig.receiver.faults = ["silence"]
    wait_until(lambda: rig.sync._is_resting)
    time.sleep(0.1)
    assert rig.sync.loading == -1
    rig.sync.rise()
    rig.receiver.faults = []
    assert rig.wait(4).version == 2
    rig.sync.check()
