"""The figures of a service, in the text format of Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, TypeAlias

from cosmos_service_reward_service.capacity import Capacity
from cosmos_service_reward_service.ledger import Ledger
from cosmos_service_reward_service.scorers import Scorer

CONTENT_TYPE: Final = "text/plain; version=0.0.4"

Labels: TypeAlias = Mapping[str, str]
Family: TypeAlias = tuple[str, str, str, Iterable[tuple[Labels, float]]]


class Figures:
    """Counters of requests."""

    def __init__(self) -> None:
        self.answers: Final[Counter[tuple[str, int]]] = Counter()
        self.num_finished = 0
        self.finished_s = 0.0

    def finish(self, seconds: float) -> None:
        """A request has its results, so long after it came."""
        self.num_finished += 1
        self.finished_s += seconds


def exposition(figures: Figures, scorers: Iterable[Scorer], capacity: Capacity, ledger: Ledger) -> str:
    """All figures of a service."""
    return "".join(_text(*family) for family in _families(figures, tuple(scorers), capacity, ledger))


def _families(figures: Figures, scorers: tuple[Scorer, ...], capacity: Capacity, ledger: Ledger) -> Iterator[Family]:
    answers = figures.answers.items()
    yield (
        "cosmos_reward_answers_total",
        "counter",
        "HTTP answers, by path and status.",
        [({"path": path, "status": str(status)}, number) for (path, status), number in sorted(answers)],
    )
    yield ("cosmos_reward_requests_total", "counter", "Requests with results.", [({}, figures.num_finished)])
    yield (
        "cosmos_reward_request_seconds_total",
        "counter",
        "Seconds from their coming to their results.",
        [({}, figures.finished_s)],
    )
    yield ("cosmos_reward_pending", "gauge", "Requests without results.", [({}, ledger.num_pending)])
    yield ("cosmos_reward_pending_bytes", "gauge", "Bytes that they hold.", [({}, capacity.held_bytes)])
    yield ("cosmos_reward_results", "gauge", "Results that are kept.", [({}, ledger.num_done)])
    yield (
        "cosmos_reward_scores_total",
        "counter",
        "Completions by scorer and by what became of them.",
        [
            ({"scorer": each.name, "outcome": status.value}, number)
            for each in scorers
            for status, number in each.counts.items()
        ],
    )
    yield (
        "cosmos_reward_scoring_seconds_total",
        "counter",
        "Seconds that scores took.",
        [({"scorer": each.name}, each.scoring_s) for each in scorers],
    )
    yield (
        "cosmos_reward_waiting",
        "gauge",
        "Completions that are being scored or wait for it.",
        [({"scorer": each.name}, each.num_owed) for each in scorers],
    )
    yield (
        "cosmos_reward_restarts_total",
        "counter",
        "Worker processes that were started again.",
        [({"scorer": each.name}, each.num_restarts) for each in scorers],
    )
    yield (
        "cosmos_reward_up",
        "gauge",
        "1 if the scorer works.",
        [({"scorer": each.name}, float(not each.fault)) for each in scorers],
    )


def _text(name: str, kind: str, words: str, series: Iterable[tuple[Labels, float]]) -> str:
    lines = [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]
    lines += [f"{name}{_labels(labels)} {float(value)!r}" for labels, value in series]
    return "\n".join(lines) + "\n"


def _labels(labels: Labels) -> str:
    # Names of scorers, paths and numbers have nothing to escape.
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}" if labels else ""
