"""When every policy replica is gone: what is on disk is gone on from, and what came after it did not happen.

The weights of a step live in the policy replicas that hold them, in its checkpoint, and those of step 0 wherever the
run's seed is. Where the newest step is in none of these, the run is taken back to its newest checkpoint, or to its
beginning. Rollout replicas stay: what they loaded of steps that were undone they give up (`RolloutDirective.rewinds`),
as the versions will come again with other weights. What they generated since counts as `rewound`, and its prompts, and
all that were trained on since, are queued as they were.
"""

from __future__ import annotations

from typing import Final

from cosmos_core.control.machine import changes, evaluation, membership, publication, relays
from cosmos_core.control.machine.events import Rewound
from cosmos_core.control.machine.state import Replica, State
from cosmos_core.errors import JournalError

MAX_REWINDS: Final = 10
"""Times in a row that a run may be taken back to one step: whatever ends its policy replicas would do so for ever."""


def is_headless(state: State) -> bool:
    """Whether nobody has the newest weights any more, so that the run must be taken back."""
    if state.outcome or not state.has_started or _is_kept(state):
        return False
    return not any(policy.step >= state.step for policy in state.named("policy") if not policy.is_leaving)


def newest_kept(state: State) -> int:
    """The newest step of which there is a checkpoint; 0 if there is none."""
    return max(state.checkpoints.saved, default=0)


def rewind(state: State, event: Rewound) -> None:
    """Undo the steps after one that is kept.

    Raises:
        JournalError: The journal does not know that step.
    """
    marks = state.marks.get(event.step)
    if marks is None:
        raise JournalError(f"the run was taken back to step {event.step}, of which the journal has no account")
    if state.rewinds[-MAX_REWINDS:] == [event.step] * MAX_REWINDS:
        state.fail(
            f"the policy replicas were lost {MAX_REWINDS + 1} times before a checkpoint after step {event.step}; see "
            "their logs, or set policy.checkpoint.interval lower"
        )
        return
    state.rewinds.append(event.step)
    state.status_details["rewound"] = f"from step {state.step} to step {event.step}: all policy replicas were lost"
    _undo_training(state, event.step)
    for policy in state.named("policy"):
        if policy.step > event.step:
            membership.lose(
                state, policy, f"the run was taken back to step {event.step}, and it holds a later one's weights"
            )
    state.ledgers = [ledger.rewound(mark) for ledger, mark in zip(state.ledgers, marks, strict=True)]
    for replica in state.named("rollout"):
        _undo_generation(state, replica, event.step)
        state.spare.add(replica.name)
    _undo_publication(state, event.step)
    _undo_changes(state, event.step)
    changes.settle(state)
    state.publish = publication.due_at_start(state)
    evaluation.schedule(state)
    relays.arrange(state)
    state.touch()


def _is_kept(state: State) -> bool:
    return state.step == 0 or state.step in state.checkpoints.saved


def _undo_training(state: State, step: int) -> None:
    evaluation.tell_left_behind(state, step)
    state.step = step
    state.running = state.generation = None
    state.undone = state.generation_number
    state.is_regrouping = False
    state.attempts = state.num_regroups = state.num_useless = 0
    state.pending.clear()
    del state.steps[step:]
    state.evaluations = [done for done in state.evaluations if done.version <= step]
    checkpoints = state.checkpoints
    checkpoints.ordered = -1
    checkpoints.failed = {failed: why for failed, why in checkpoints.failed.items() if failed < step}
    state.marks = {marked: mark for marked, mark in state.marks.items() if marked <= step}


def _undo_changes(state: State, step: int) -> None:
    kept = changes.keep(state.changes, step, state.settings, state.settings)
    changes.tell_undone(state, kept, step)
    state.changes = kept


def _undo_generation(state: State, replica: Replica, step: int) -> None:
    replica.leases.clear()
    replica.num_training = 0
    replica.held.clear()
    replica.kept = {version: endpoint for version, endpoint in replica.kept.items() if version <= step}
    if replica.version > step:
        state.hold(replica, -1)


def _undo_publication(state: State, step: int) -> None:
    """Versions up to the step are what they were, though nobody may have them but rollout replicas."""
    newest = max(state.holders, default=-1)
    state.targets = sorted({target for target in state.targets if target <= step} | ({newest} - {-1}))
    state.published = {version: known for version, known in state.published.items() if version <= step}
