"""What a run looks like, at moments of runs that are driven by hand."""

import attrs
import msgspec
import pytest

from cosmos_core.config.job import Stage
from cosmos_core.config.schema import OptimizerConfig
from cosmos_core.control.live.event_feed import EventFeed
from cosmos_core.control.live.figures import Timeline
from cosmos_core.control.live.snapshot import MOST_REPLICAS, status_of, take
from cosmos_core.control.machine.events import Commanded, ReplicaLost
from cosmos_core.run.screen import facts
from cosmos_core.transport.messages import REQUEST, Drain
from cosmos_core.transport.reports import Troubled


class Watched:
    """A run and its event feed."""

    def __init__(self, run):
        self.run = run
        self.feed = EventFeed()
        self.timeline = Timeline()
        self.num_noted = 0
        self.now = 100.0
        self.look()

    def look(self, gauges=None):
        self.now += 1.0
        for event in self.run.events[self.num_noted :]:
            self.feed.note(event, self.now)
            self.timeline.take(self.now, event, self.run.state)
        self.num_noted = len(self.run.events)
        stage = Stage(
            index=0,
            key="algorithm",
            plugin="grpo",
            options={},
            first_step=0,
            steps=3,
            prompts_per_step=2,
            optimizer=OptimizerConfig(),
        )
        stages = (stage,) * len(self.run.state.settings.stages)
        return take(self.run.state, self.feed, self.timeline, stages, gauges or {}, name="demo", now=self.now)

    def news(self, kind):
        return [news.text for news in self.look().news if news.kind == kind]


@pytest.fixture
def watched(run):
    return lambda **options: Watched(run(**options))


def statuses(snapshot):
    return {replica.name: replica.status for replica in snapshot.replicas}


def test_replicas_are_shown_with_what_they_do(watched):
    found = watched().look()
    assert (found.phase, found.step, found.num_steps, found.version) == ("starting", 0, 3, -1)
    assert found.replicas == ()
    assert found.reward is None
    assert found.members == ()

    it = watched(rollout_replicas=2)
    it.run.join("p0")
    it.run.join("r0")
    assert statuses(it.look()) == {"p0": "forming", "r0": "joined"}
    it.run.follow("p0")
    it.run.follow("p0")
    assert statuses(it.look()) == {"p0": "waiting", "r0": "loading"}
    it.run.join("r1")
    it.run.report("r0", *it.run.fakes["r0"]._load(it.run.directive("r0")))
    found = it.look({"r0": {"units_per_s": 12.5}})
    assert statuses(found) == {"p0": "waiting", "r0": "generating", "r1": "loading"}
    assert found.statuses == {"policy": {"waiting": 1}, "rollout": {"generating": 1, "loading": 1}}
    assert found.versions == {-1: 1, 0: 1}
    assert found.rollout_units_per_s == 12.5
    assert found.queue.in_flight == found.replicas[1].in_flight > 0
    for lease in it.run.leases("r0")[:2]:
        it.run.finish("r0", lease)
    assert statuses(it.look())["p0"] == "training"


def test_a_run_to_its_end_has_curves_staleness_rewards_and_news(watched):
    it = watched()
    it.run.start()
    it.look()
    it.run.settle()
    found = it.look()
    assert found.outcome == "finished"
    assert found.step == 3
    curves = {curve.name: curve.points for curve in found.curves}
    assert [x for x, _ in curves["reward"]] == [1, 2, 3]
    assert sum(found.staleness.values()) == sum(record.num_samples for record in it.run.state.steps)
    assert found.reward == pytest.approx(sum(record.reward for record in it.run.state.steps) / 3)
    assert found.rewards == {}
    kinds = {news.kind for news in found.news}
    assert {"joined", "generation", "checkpoint", "ended"} <= kinds
    assert len({news.time for news in found.news}) > 1

    # The loss of a warm-up is another quantity.
    it = watched(warmup=1)
    it.run.start()
    it.run.settle()
    curves = {curve.name: curve.points for curve in it.look().curves}
    assert (curves["warm-up loss"], curves["loss"][0]) == (((1, 1.0),), (2, 0.5))

    it = watched()
    it.run.start()
    it.run.settle()
    first, *others = it.run.state.steps
    it.run.state.steps[:] = [attrs.evolve(first, rewards={"right": 1.0, "brief": -0.5})] + [
        attrs.evolve(each, rewards={"right": 0.5, "brief": 0.0}) for each in others
    ]
    found = it.look()
    assert found.rewards == pytest.approx({"right": 2 / 3, "brief": -0.5 / 3})
    assert ("rewards", "right 0.667, brief -0.167") in facts(found)


def test_an_evaluation_is_told_by_what_its_samples_are(watched, make_sample, subtests):
    for unit, label, name in [("token", "held-out", "accuracy"), ("denoising step", "held-out reward", "reward")]:
        with subtests.test(unit=unit):
            it = watched(evaluation_prompts=1, unit=unit)
            it.run.start()
            assert label not in dict(facts(it.look()))
            it.run.finish("r0", it.run.leases()[0], make_sample(status="reward_failed"))
            found = it.look()
            assert (found.accuracy, found.heldout_reward, found.evaluated_step, found.unit) == (None, None, 0, unit)
            assert dict(facts(found))[label] == "not measured @0 (1 of 1 unscored)"
            assert [each.row for each in found.heldout.completions] == [0]
            none = "weights of step 0: not measured, as none of 1 held-out prompts was scored"
            assert it.news("evaluated") == [none]

            (unscored,) = it.run.state.evaluations
            accuracy = -0.5 if unit == "token" else None
            it.run.state.evaluations.append(attrs.evolve(unscored, version=2, accuracy=accuracy, reward=-0.5))
            found = it.look()
            assert dict(facts(found))[label] == "-0.500 @2 (1 of 1 unscored)"
            assert it.news("evaluated") == [none, f"weights of step 2: held-out {name} -0.500 (1 of 1 unscored)"]
            assert {curve.name: curve.points for curve in found.curves} == {f"held-out {name}": ((2.0, -0.5),)}


def test_replicas_that_are_lost_or_drain_say_so(watched):
    it = watched()
    it.run.start()
    it.run.apply(ReplicaLost(name="r0", incarnation=it.run.incarnations["r0"], reason="silent for 15 s"))
    found = it.look()
    assert statuses(found)["r0"] == "lost"
    assert [replica.detail for replica in found.replicas if replica.name == "r0"] == ["silent for 15 s"]
    assert it.news("left") == ["r0: silent for 15 s"]
    it.run.join("r0")
    assert statuses(it.look())["r0"] == "loading"

    it = watched(rollout_replicas=2)
    it.run.start(rollouts=2)
    it.run.apply(Commanded(ident="a", request=REQUEST.encode(Drain(name="r1"))))
    assert status_of(it.run.state, it.run.state.replicas["r1"]) == "draining"
    assert it.news("asked") == ["drain r1"]


def test_what_was_dropped_is_counted_and_told(watched):
    it = watched()
    it.run.start()
    it.look()
    for lease in it.run.leases()[:2]:
        it.run.finish("r0", lease, drop="all the same")
    found = it.look()
    assert found.queue.dropped == {"all the same": 2}
    assert it.news("dropped") == ["2 prompts: all the same"]
    assert it.news("dropped") == ["2 prompts: all the same"]  # once


def test_what_goes_wrong_again_and_again_is_news_ever_less_often(watched):
    it = watched()
    it.run.start()
    for _ in range(300):
        it.run.report("r0", Troubled(what="late", number=1, last="why"))
        it.look()
    assert it.news("problem") == [f"late: {1 << power} or more" for power in range(9)]
    assert it.run.state.status_details["late"] == "300, the last: why"


def test_what_models_write_is_kept_as_it_is_and_bounded(watched, make_sample):
    it = watched()
    it.run.start()
    text = "<script>alert(1)</script>" + "x" * 3000
    first, second, *_ = it.run.leases()
    it.run.finish("r0", first, *map(make_sample, range(4)), text=text)
    it.run.finish("r0", second, *map(make_sample, range(4)), text="")
    sample, silent = it.look().samples
    assert (silent.text, silent.reward) == ("", 1.0)
    assert sample.text == text[:2000]
    assert sample.lease == first.lease
    assert (sample.replica, sample.version, sample.status, sample.reward, sample.units) == ("r0", 0, "ok", 1.0, 10)


def test_a_snapshot_is_json_and_does_not_change_with_the_run(watched):
    it = watched()
    it.run.start()
    found = it.look()
    before = msgspec.json.encode(found)
    it.run.settle()
    it.look()
    assert msgspec.json.encode(found) == before


def test_of_very_many_replicas_the_first_are_shown_and_all_are_counted(watched):
    it = watched(rollout_replicas=MOST_REPLICAS + 50)
    it.run.join("p0")
    for index in range(MOST_REPLICAS + 50):
        it.run.join(f"r{index}")
    found = it.look()
    assert len(found.replicas) == MOST_REPLICAS
    assert found.statuses["rollout"] == {"joined": MOST_REPLICAS + 50}


def test_curves_follow_a_resumed_run_and_a_feed_that_begins_late(watched):
    it = watched(policy_checkpoint_interval=1)
    it.run.start()
    it.run.settle()
    assert len(it.look().curves[0].points) == 3
    it.run.resume(1)
    found = it.look()
    assert found.step == 1
    assert {len(curve.points) for curve in found.curves} == {1}

    it = watched()
    it.run.start()
    it.run.settle()
    late = Watched(it.run)
    assert [x for x, _ in late.look().curves[0].points] == [1, 2, 3]
