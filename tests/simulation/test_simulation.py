"""Seeded runs of the real server loop, machine and sessions: every oracle holds whatever happens."""

from __future__ import annotations

import re

import pytest

from cosmos_core.control.machine.events import EVENTS, ControllerStarted
from cosmos_core.errors import ConfigError
from cosmos_core.transport.reports import Slept, WeightsLoaded, WeightsRejected
from tests.simulation.simulator import Faults, Scenario, Simulation, Violation
from tests.simulation.simulator.__main__ import main
from tests.simulation.simulator.outcome import HOPELESS

from .plants import PLANTS
from .plants.planting import planted


def test_every_oracle_holds_whatever_happens(subtests):
    for seed in range(30):
        with subtests.test(seed=seed):
            state = Simulation(seed).run()
            assert state.has_ended
            if state.outcome == "finished":
                check_evaluations(state)


@pytest.mark.sweep
def test_every_oracle_holds_in_many_seeds():
    outcomes = [Simulation(seed).run().outcome for seed in range(2000)]
    assert outcomes.count("failed") < len(outcomes) / 20


def check_evaluations(state) -> None:
    """Every evaluation that was due was made once, or is said to be lost."""
    versions = range(state.step + 1)
    scored = [done.version for done in state.evaluations if done.is_of_rollouts]
    measured = [done for done in state.evaluations if done.loss is not None]
    lost = "evaluation" in state.status_details
    assert lost or scored == [version for version in versions if state.settings.evaluates(version)]
    assert lost or [done.version for done in measured] == [
        version for version in versions if state.settings.measures(version)
    ]
    assert all(done.num_prompts == state.settings.heldout_rows for done in measured)
    assert len(set(scored)) == len(scored)
    assert len({done.version for done in measured}) == len(measured)


def test_held_out_losses_are_measured_whatever_happens(subtests):
    for seed in range(8):
        with subtests.test(seed=seed):
            scenario = Scenario.drawn(seed, learns_from="demonstrations")
            state = Simulation(seed, scenario=scenario, faults=Faults(loss=0.05, repeat=0.05, crash=0.05)).run()
            assert state.outcome == "finished"
            check_evaluations(state)
            losses = [done for done in state.evaluations if done.loss is not None]
            assert losses
            assert all(done.num_units == 3 * (done.num_prompts - done.num_unscored) for done in losses)


def test_replicas_pass_weights_on_whatever_happens(subtests):
    for seed in range(6):
        with subtests.test(seed=seed):
            scenario = Scenario.drawn(
                seed, learns_from="rollouts", rollout_replicas=6, sync_fan_out=1 + seed % 2, shares_memory=False
            )
            simulation = Simulation(seed, scenario=scenario, faults=Faults(loss=0.05, crash=0.05 if seed % 3 else 0.0))
            state = simulation.run()
            assert state.outcome == "finished"
            loads = simulation.reports(WeightsLoaded)
            assert sum(load.relayed for load in loads) > len(loads) / 4
            assert seed or simulation.reports(WeightsRejected)


def test_pools_that_share_gpus_take_turns_whatever_happens(subtests):
    for seed in range(40):
        with subtests.test(seed=seed):
            source = "demonstrations" if seed % 5 == 0 else "rollouts"
            scenario = Scenario.drawn(seed, learns_from=source, takes_turns=True)
            simulation = Simulation(seed, scenario=scenario)
            state = simulation.run()
            assert not scenario.settings.rollout_replicas or simulation.reports(Slept) or state.outcome == "stopped"


def test_without_faults_nothing_is_lost(subtests):
    for seed in range(3):
        with subtests.test(seed=seed):
            scenario = Scenario.drawn(
                seed, learns_from="rollouts", synchronous=False, sync_interval=1, sync_max_staleness=1
            )
            state = Simulation(seed, scenario=scenario, faults=Faults()).run()
            assert state.outcome == "finished"
            assert not state.fenced
            assert all("lost" not in ledger.samples.dropped for ledger in state.ledgers)
            assert all(record.attempt == 1 for record in state.steps)


def test_a_seed_decides_everything():
    first, second = Simulation(17, kept=10**6), Simulation(17, kept=10**6)
    assert first.run() == second.run()
    assert first.trace.lines() == second.trace.lines()
    assert first.disk.committed == second.disk.committed


def test_whatever_the_disk_does_nothing_is_said_before_it_is_durable(subtests):
    for fault in ["disk_full", "commit_failure", "commit_crash", "slow_commit"]:
        with subtests.test(fault=fault):
            rates = {"disk_full": 2.0, "commit_failure": 0.3, "commit_crash": 0.3, "slow_commit": 0.5}
            simulation = Simulation(3, faults=Faults(loss=0.05, slow_s=1.5, **{fault: rates[fault]}))
            state = simulation.run()
            assert state.outcome == "finished"
            if fault == "slow_commit":
                assert simulation.controller.num_starts == 1
                assert not state.fenced, "nobody is taken for silent because the controller waited for its disk"
            else:
                assert simulation.controller.num_starts > 1
            assert simulation.disk.num_failures or fault in ("slow_commit", "commit_crash")


@pytest.mark.parametrize("seed", range(4))
def test_a_power_cut_takes_the_end_of_the_journal_and_no_term(seed):
    faults = Faults(loss=0.05, repeat=0.05, controller_crash=1.0, power_cut=1.0)
    simulation = Simulation(seed, scenario=Scenario.drawn(seed, learns_from="rollouts"), faults=faults)
    cuts = []
    lose_end = simulation.disk.lose_end
    simulation.disk.lose_end = lambda: cuts.append(lose_end()) or cuts[-1]
    state = simulation.run()
    assert state.outcome == "finished"
    assert any(cuts)
    events = [EVENTS.decode(data) for data in simulation.disk.committed]
    terms = [event.term for event in events if isinstance(event, ControllerStarted)]
    assert terms == [*range(1, simulation.controller.num_starts + 1)]


def test_a_power_cut_takes_no_resume_back():
    assert Simulation(884).run().outcome == "finished"


def test_a_violation_tells_how_it_is_seen_again(capsys):
    (plant,) = (plant for plant in PLANTS if plant.name == "acknowledged before the commit")
    with planted(plant):
        assert main(["--seed", "0"]) == 1
        first = capsys.readouterr().err
        (command,) = re.findall(r"again: python -m tests.simulation.simulator (.*)", first)
        assert main(command.split()) == 1
    second = capsys.readouterr().err
    assert first.startswith("durable: ")
    assert "says hello" in second
    assert first.splitlines()[0] == second.splitlines()[0], "another violation"


def test_the_command_tells_what_it_simulated(capsys):
    assert main(["--seeds", "0:2", "--faults", "loss=0.1,until_s=5"]) == 0
    assert re.match(r"2 runs: 2 finished; [\d,]+ events in ", capsys.readouterr().out)


def test_what_makes_no_sense_is_refused(capsys, subtests):
    for argv, message in [
        (["--seeds", "9"], "--seeds is '9'; it must be two numbers"),
        (["--seeds", "9:3"], "must be two numbers, the smaller first"),
        (["--seed", "1", "--faults", "los=0.1"], "unknown fault 'los'; did you mean loss?"),
        (["--seed", "1", "--faults", "loss=much"], "loss is 'much'; it must be a number"),
        (["--seed", "1", "--faults", "loss=-1"], "must not be negative"),
    ]:
        with subtests.test(argv=argv):
            assert main(argv) == 2
            assert message in capsys.readouterr().err


def test_faults_are_written_as_they_are_read():
    faults = Faults.drawn(5)
    assert Faults.parse(str(faults)) == faults
    with pytest.raises(ConfigError):
        Faults.parse("nothing")


def test_a_violation_is_an_oracle_and_what_it_saw():
    assert str(Violation("batch", "twice")) == "batch: twice"


def test_only_what_came_to_nothing_too_often_is_excused(subtests):
    for reason, is_hopeless in [
        ("step 4 was tried 3 times without success; last: its leases were lost", True),
        ("the gradient group broke 4 times in a row; last: p0 was lost", True),
        ("the policy replicas were lost 4 times before a checkpoint after step 2; see their logs", True),
        ("step 4 is running after step 2", False),
        ("step 4 has no snapshot", False),
    ]:
        with subtests.test(reason=reason):
            assert bool(HOPELESS.match(reason)) == is_hopeless
