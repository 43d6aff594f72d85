"""Bugs in how a run goes on: dynamic keys, steps that are undone, checkpoints, resuming, recovery, its end."""

from __future__ import annotations

from .planting import plant

MACHINE = "cosmos_core.control.machine"
RECOVERY = f"{MACHINE}.recovery"
PROGRESS = f"{MACHINE}.progress"
LEDGER = f"{MACHINE}.ledger:Ledger"

PLANTS = (
    plant(
        "a change holds at a step that has been ordered",
        (f"{MACHINE}.changes:next_step", "state.step + (2 if state.attempts else 1)", "state.step + 1"),
    ),
    plant(
        "each attempt at a step goes by other values",
        (
            f"{MACHINE}.batch_assembly:_order",
            "settings=changes.values_at(state, state.step + 1)",
            "settings=changes.values_at(state, state.step + state.attempts)",
        ),
    ),
    plant(
        "a change holds one step late",
        (f"{MACHINE}.changes:values_at", "if change.step <= step}", "if change.step < step}"),
    ),
    plant(
        "the controller goes by the recipe for ever",
        (f"{PROGRESS}:enter_step", "if changes.settle(state):", "if False:"),
        (f"{MACHINE}.core:_take_command", "progress.enter_step(state)", "pass"),
    ),
    plant(
        "a run without its weights waits for ever",
        (f"{RECOVERY}:is_headless", "return not any(", "return False and not any("),
    ),
    plant(
        "prompts of undone steps stay consumed",
        (f"{RECOVERY}:roll_back", "[ledger.rolled_back(then) for ledger, then in", "[ledger for ledger, then in"),
    ),
    plant(
        "weights of undone steps stay published",
        (
            f"{RECOVERY}:_undo_publication",
            "for version, known in state.published.items() if version <= step}",
            "for version, known in state.published.items()}",
        ),
        (
            f"{RECOVERY}:_undo_publication",
            "{target for target in state.targets if target <= step}",
            "{target for target in state.targets}",
        ),
    ),
    plant(
        "rollout replicas keep weights of undone steps",
        (f"{RECOVERY}:_undo_generation", "if replica.version > step:", "if False:"),
    ),
    plant(
        "rollout replicas are not told of undone steps",
        (f"{MACHINE}.directives:_rollout", "rollbacks=tuple(state.rollbacks)", "rollbacks=()"),
    ),
    plant(
        "reports of undone generations count",
        (f"{RECOVERY}:_undo_training", "state.undone = state.generation_number", "pass"),
    ),
    plant("records of undone steps stay", (f"{RECOVERY}:_undo_training", "history.undo(state.steps, step)", "pass")),
    plant(
        "policy replicas with weights of undone steps stay",
        (f"{RECOVERY}:roll_back", "if policy.step > event.step:", "if False:"),
    ),
    plant(
        "changes of undone steps stay",
        (f"{RECOVERY}:_undo_changes", "state.changes = kept", "pass"),
    ),
    plant(
        "a resumed run forgets what was live",
        (f"{LEDGER}.restore", "for position in range(first, end)]", "for position in ()]"),
    ),
    plant(
        "a resumed run forgets what was asked for",
        (f"{RECOVERY}:resume", "commands=state.commands,", ""),
    ),
    plant(
        "a resumed run keeps records of steps that did not happen",
        (f"{RECOVERY}:resume", "[record for record in state.steps if record.step <= event.step]", "state.steps"),
    ),
    plant(
        "a resumed run does not say what was undone",
        (f"{RECOVERY}:resume", "undone=state.generation_number,", ""),
    ),
    plant(
        "who was in a run that is resumed may come back",
        (
            f"{RECOVERY}:resume",
            'state.fenced[replica.incarnation] = f"{replica.name}: the run was resumed without it"',
            "pass",
        ),
    ),
    plant(
        "a snapshot is taken a prompt late",
        (
            f"{MACHINE}.recovery:snapshot_of",
            "mark=state.marks[step]",
            "mark=StepMark(ledgers=tuple(each.mark() for each in state.ledgers))",
        ),
    ),
    plant(
        "snapshots of checkpoints are forgotten",
        (f"{PROGRESS}:_forget_mark", "if state.step not in wanted:", "if True:"),
    ),
    plant(
        "checkpoints that were saved are ordered again and again",
        (f"{PROGRESS}:_settle_checkpoint", "state.checkpoints.ordered = -1", "pass"),
        (f"{PROGRESS}:on_saved", "checkpoints.saved[report.step] = report.path", "pass"),
    ),
    plant(
        "a run ends without its last checkpoint",
        (f"{PROGRESS}:close", "elif saved.ordered != state.step:", "elif False:"),
        (f"{PROGRESS}:finish_step", "if state.settings.saves(state.step):", "if False:"),
    ),
    plant(
        "a stop does not wait for the step that is running",
        (
            f"{PROGRESS}:close",
            "        if state.running is not None:\n            return",
            "        if False:\n            return",
        ),
    ),
)
