"""Whose weights are not those that were published: nobody may be told to read from them."""

from __future__ import annotations

from collections.abc import Iterator

from cosmos_core.control.machine.state import State
from cosmos_core.transport.directives import RolloutDirective
from cosmos_core.transport.reports import WeightsLoaded, WeightsRejected


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
