"""The replicas' processes in a simulation: those of the recipe, those that join, those that take another's place."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from cosmos_core.control.machine.state import State
from cosmos_core.transport.messages import WIRE_VERSION, Hello
from tests.simulation.replicas import FakePolicy, FakeRollout, World
from tests.simulation.simulator.faults import Faults
from tests.simulation.simulator.network import Agenda
from tests.simulation.simulator.replica import Replica
from tests.simulation.simulator.scenario import Scenario
from tests.simulation.simulator.trace import Trace
from tests.simulation.simulator.witness import Witness


class Processes:
    """Starts them.

    Args:
        scenario: The run.
        faults: What goes wrong with them.
        agenda: Simulated time.
        world: What they share.
        witness: Sees what they report.
        trace: Where what happened is kept.
        stream: Randomness for a purpose.
        say: Carries a message to the controller.
        state: Of the run.

    Attributes:
        faults: Of those that are started.
        replicas: The newest process of each name.
        num_named: Numbers that were given out, for processes and names.
    """

    def __init__(
        self,
        scenario: Scenario,
        faults: Faults,
        *,
        agenda: Agenda,
        world: World,
        witness: Witness,
        trace: Trace,
        stream: Callable[[str], random.Random],
        say: Callable[[bytes, bytes], None],
        state: Callable[[], State],
    ) -> None:
        self.faults = faults
        self.replicas: Final[dict[str, Replica]] = {}
        self.num_named = 0
        self._begun_at = 0
        self._scenario: Final = scenario
        self._agenda: Final = agenda
        self._world: Final = world
        self._witness: Final = witness
        self._trace: Final = trace
        self._stream: Final = stream
        self._say: Final = say
        self._state: Final = state

    def start_all(self, step: int = 0) -> None:
        """Start those of the recipe, which begin with the weights of a step; all there were have ended."""
        self._begun_at = step
        self.replicas.clear()
        settings = self._scenario.settings
        names = [f"p{index}" for index in range(settings.policy_replicas)]
        for name in [*names, *(f"r{index}" for index in range(settings.rollout_replicas))]:
            self.start(name)

    def start_another(self, role: str) -> None:
        """Start one that the recipe does not have, by the letter of its role."""
        self.num_named += 1
        self.start(f"{role}{self.num_named}")

    def start(self, name: str) -> None:
        """Start another process of a name."""
        self.num_named += 1
        incarnation = f"{name}/{self.num_named}"
        rng = self._stream(incarnation)
        is_policy = name.startswith("p")
        fake = (
            FakePolicy(self._world, name, incarnation, self._begun_at, rng=rng, break_rate=self.faults.broken_group)
            if is_policy
            else FakeRollout(self._world, incarnation, rng=rng, drop_every=5, lie_rate=self.faults.corrupt)
        )
        hello = Hello(
            wire=WIRE_VERSION,
            run_id=self._scenario.settings.run_id,
            name=name,
            role="policy" if is_policy else "rollout",
            incarnation=incarnation,
            # Few hosts, and fewer racks: some replicas share them.
            host=f"host-{name[-1]}" if is_policy else f"host-{self.num_named % 3}",
            rack=f"rack-{self.num_named % 2}",
            pid=self.num_named,
            step=self._begun_at if is_policy else 0,
            endpoints=fake.endpoints,
        )
        self.replicas[name] = Replica(
            hello,
            fake,
            agenda=self._agenda,
            rng=rng,
            faults=self.faults,
            control=self._scenario.control,
            witness=self._witness,
            trace=self._trace,
            say=self._say,
            holders=lambda strangers: self._holders("r" if is_policy else "p", strangers=strangers),
            building_s=self._building_s(incarnation),
        )

    def _building_s(self, incarnation: str) -> float | None:
        if not self._scenario.settings.takes_turns:
            return None
        rng = self._stream(f"building of {incarnation}")
        return rng.choice((0.0, 0.1, 3.0)) * rng.random()

    def _holders(self, role: str, *, strangers: bool) -> list[str]:
        """The processes of a role, by its letter, that have the GPUs; or only those that are not in the run."""
        if not self._scenario.settings.takes_turns:
            return []
        members = {each.incarnation for each in self._state().replicas.values()} if strangers else ()
        return [
            each.name
            for each in self.replicas.values()
            if each.is_up and each.name[0] == role and (each.is_building or each.fake.is_awake)
            if each.incarnation not in members
        ]

    def calm(self, faults: Faults) -> None:
        """Faults cease: who stands still goes on."""
        self.faults = faults
        for replica in self.replicas.values():
            replica.faults = faults
            replica.frozen_until = 0.0

    def awake(self, state: State) -> dict[str, list[str]]:
        """Those that live, are in the run and are awake, by role.

        After a power cut not those who know of what the journal has lost: they end as soon as they are heard.
        """
        members = {each.incarnation: each.role for each in state.replicas.values()}
        found: dict[str, list[str]] = {}
        for each in self.replicas.values():
            knows_more = each.acknowledged > self._witness.durable.get(each.incarnation, 0)
            if each.is_up and each.fake.is_awake and each.incarnation in members and not knows_more:
                found.setdefault(members[each.incarnation], []).append(each.name)
        return found

    def policies(self, state: State) -> list[FakePolicy]:
        """The policies that live and are in the run."""
        members = {each.incarnation for each in state.replicas.values()}
        found = [each.fake for each in self.replicas.values() if each.is_up and each.incarnation in members]
        return [fake for fake in found if isinstance(fake, FakePolicy)]
