"""What weights replicas hold, and shall load, as they told and were told: apart from the machine's counts."""

from __future__ import annotations

from collections.abc import Iterator

from cosmos_core.control.machine.events import Reported
from cosmos_core.control.machine.state import State
from cosmos_core.transport.directives import PolicyDirective, RolloutDirective
from cosmos_core.transport.reports import GenerationFormed, Report, StepDone, WeightsLoaded, WeightsRejected


class Holdings:
    """Hears what policy replicas say of the step whose weights they hold."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}
        """By incarnation, of those that told."""

    def hear(self, state: State, event: Reported, report: Report | None, undone: int) -> None:
        """Take a report in; the state is that before it, and generations up to `undone` did not happen."""
        replica = state.replicas.get(event.name)
        is_next = replica is not None and (replica.incarnation, replica.received + 1) == (
            event.incarnation,
            event.sequence,
        )
        if is_next and isinstance(report, StepDone | GenerationFormed) and report.generation > undone:
            self._steps[event.incarnation] = report.step

    def observe(self, state: State) -> Iterator[tuple[str, str]]:
        """What is wrong after an event: the oracle's name, and what it saw."""
        for replica in state.replicas.values():
            if replica.step != (step := self._steps.get(replica.incarnation, replica.step)):
                yield "versions", f"{replica.name} told that it holds step {step}, it is said to hold {replica.step}"


def withdrawn(
    before: set[int], state: State, told: dict[str, tuple[int, PolicyDirective | RolloutDirective | None]]
) -> Iterator[tuple[str, str]]:
    """Versions that are gone while somebody may be loading them.

    As many of the newest are kept as may still be of use, however many replicas never load them.

    Args:
        before: Those that were published before an event.
        state: After it.
        told: Term and content of the newest directive of each incarnation.
    """
    gone = {version for version in before - state.published.keys() if version <= state.step}
    if not gone:
        return
    least = state.settings.sync_max_staleness // state.settings.sync_interval + 2
    for replica in state.named("rollout"):
        _, content = told.get(replica.incarnation, (0, None))
        target = content.weights if isinstance(content, RolloutDirective) else None
        if target is None or target.version not in gone or target.version <= replica.version:
            continue
        if sum(version > target.version for version in state.targets) < least:
            yield "versions", f"{replica.name} was told to load version {target.version}, which is gone"


class Doubts:
    """Hears what rollout replicas say of the weights that they loaded."""

    def __init__(self) -> None:
        self._doubted: set[str] = set()
        """Incarnations whose last weights were others than those published."""
        self._copies: dict[str, str] = {}
        """Who passes weights on, by the endpoint."""

    def hear(self, state: State, incarnation: str, report: WeightsLoaded | WeightsRejected) -> None:
        """One has loaded weights, or found that what it loaded is wrong; the state is that before the report."""
        known = state.published.get(report.version)
        if isinstance(report, WeightsRejected) or (known is not None and report.digest != known.digest):
            self._doubted.add(incarnation)
        elif known is not None:
            self._doubted.discard(incarnation)
        if isinstance(report, WeightsLoaded) and report.endpoint:
            self._copies[report.endpoint] = incarnation

    def spread(self, incarnation: str, directive: RolloutDirective) -> Iterator[tuple[str, str]]:
        """What is wrong with what one is told to read or pass on: the oracle's name, and what it saw."""
        if directive.relaying.keep and incarnation in self._doubted:
            yield "digest", f"{incarnation} shall pass weights on, and its last ones were wrong"
        for target in filter(None, (directive.weights, directive.relaying.reserve)):
            for source in target.sources:
                if self._copies.get(source, "") in self._doubted:
                    yield "digest", f"version {target.version} shall be read from {source}, whose weights were wrong"
