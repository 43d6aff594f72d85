"""What an audit finds."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from cosmos_core.transport.directives import GroupRef


@attrs.frozen(kw_only=True)
class Batch:
    """What one step was trained on.

    Attributes:
        step: The step.
        stage: Index of its stage.
        attempt: How many times it was ordered.
        generation: The gradient group that applied it.
        members: The replicas of that group.
        groups: What was ordered: prompts, rows, leases, and how each sample ended.
        dropped: Demonstrations of it that could not be used, by position, and why.
        sequence: The journal's entry with which it was done.
        time: Unix time of that entry.
    """

    step: int
    stage: int
    attempt: int
    generation: int
    members: tuple[str, ...]
    groups: tuple[GroupRef, ...]
    dropped: Mapping[int, str]
    sequence: int
    time: float


@attrs.frozen(kw_only=True)
class StageAudit:
    """The prompts of a stage.

    Attributes:
        given_out: Positions of the stream that were ever touched, from 0 on.
        consumed: Trained on.
        dropped: Dropped, by reason.
        live: Queued, in flight, finished or claimed when the journal ends.
        before: Of all of these, those that ended before the journal began: it was recovered.
    """

    given_out: int
    consumed: int
    dropped: Mapping[str, int]
    live: int
    before: int


@attrs.frozen(kw_only=True)
class Audit:
    """What a journal proves.

    Attributes:
        run_id: The run.
        entries: Journal entries.
        terms: Starts of the controller that are on record.
        lost: How often a replica was lost.
        stages: Of each stage.
        batches: Of each step, in order.
        undone: Steps that were applied and then given up, because the run went on from an earlier checkpoint.
        problems: What does not add up; none: each prompt was consumed once, or dropped with a reason, or is live.
    """

    run_id: str
    entries: int
    terms: int
    lost: int
    stages: tuple[StageAudit, ...]
    batches: tuple[Batch, ...]
    undone: int
    problems: tuple[str, ...]
