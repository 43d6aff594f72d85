"""Bugs in who is in the run: generations of the gradient group, attempts at steps, draining."""

from __future__ import annotations

from .planting import plant

MACHINE = "cosmos_core.control.machine"
MEMBERSHIP = f"{MACHINE}.membership"

PLANTS = (
    plant(
        "an old generation counts as the present one",
        (
            f"{MEMBERSHIP}:on_formed",
            "if generation is None or generation.order.generation != report.generation:",
            "if generation is None:",
        ),
    ),
    plant(
        "an old generation breaks the present one",
        (
            f"{MEMBERSHIP}:on_broken",
            "state.generation is not None and state.generation.order.generation == report.generation",
            "state.generation is not None",
        ),
    ),
    plant(
        "one member that has formed is enough",
        (f"{MEMBERSHIP}:on_formed", "if set(generation.formed) != set(generation.order.members):", "if False:"),
    ),
    plant(
        "a joiner breaks a step that is running",
        (f"{MEMBERSHIP}:regroup", "not generation.is_ready or state.running is not None", "not generation.is_ready"),
    ),
    plant(
        "the newest weights are not passed on to who lacks them",
        (f"{MEMBERSHIP}:regroup", "transfer=len(set(steps)) > 1 and not checkpoint", "transfer=False"),
    ),
    plant(
        "the oldest weights are passed on",
        (f"{MEMBERSHIP}:regroup", "steps.index(max(steps))", "steps.index(min(steps))"),
    ),
    plant(
        "a generation goes on without a member that was lost",
        (f"{MEMBERSHIP}:lose", "            state.generation = None", "            pass"),
    ),
    plant(
        "generations have one number",
        (f"{MEMBERSHIP}:regroup", "state.generation_number += 1", "state.generation_number = 1"),
    ),
    plant(
        "who holds weights of a step that was not done stays",
        (f"{MEMBERSHIP}:_settle", "if step > newest}", "if step > newest + 9}"),
    ),
    plant(
        "a member that was further than it had told is passed over",
        (f"{MEMBERSHIP}:_settle", "if len(steps) > 1:", "if len(steps) > 9:"),
        (f"{MEMBERSHIP}:_settle", "(step,) = steps", "step = max(steps)"),
    ),
    plant(
        "a batch is not given out again to a new generation",
        (f"{MEMBERSHIP}:_settle", "batch_assembly.repeat(state)", "pass"),
    ),
    plant(
        "a pause after a broken group has no end",
        (f"{MEMBERSHIP}:on_time", "state.is_regrouping = False", "pass"),
    ),
    plant(
        "any attempt at a step counts",
        (
            f"{MACHINE}.progress:on_step_done",
            "(report.step, report.attempt, report.generation) != (order.step, order.attempt, running.generation)",
            "report.step > order.step",
        ),
    ),
    plant(
        "attempts are not counted",
        (f"{MACHINE}.batch_assembly:_order", "state.attempts += 1", "state.attempts = 1"),
    ),
    plant(
        "one member that has applied a step is enough",
        (
            f"{MACHINE}.progress:on_step_done",
            "return running.done.issuperset(generation.order.members)",
            "return True",
        ),
    ),
    plant(
        "a step is ordered before the group has formed",
        (f"{MACHINE}.batch_assembly:form", "generation is None or not generation.is_ready", "generation is None"),
    ),
    plant(
        "any failure of a step is the present one's",
        (
            f"{MACHINE}.batch_assembly:on_step_failed",
            "(order.step, order.attempt) == (report.step, report.attempt)",
            "order.step >= report.step",
        ),
    ),
    plant(
        "who drains leaves with payloads that are wanted",
        (f"{MACHINE}.membership:_is_free", "not replica.leases and not replica.held", "not replica.leases"),
    ),
    plant(
        "a policy replica that drains leaves its group at once",
        (
            f"{MACHINE}.membership:_is_free",
            "generation is None or not generation.is_ready or replica.name in generation.order.members",
            "generation is None",
        ),
        (
            f"{MEMBERSHIP}:_members",
            "if any(policy.step == newest for policy in staying)",
            "if staying",
        ),
    ),
    plant(
        "the last replica of a role may leave",
        (f"{MACHINE}.membership:refusal", "if is_needed and not any(", "if False and not any("),
    ),
    plant(
        "who has left is in the run until it is silent",
        (f"{MACHINE}.membership:leave", 'lose(state, replica, "it has left, as it was asked to")', "pass"),
    ),
    plant(
        "what a member has taken over is not known of it",
        (f"{MEMBERSHIP}:on_formed", "replica.step = report.step", "pass"),
    ),
    plant(
        "a group that stalls is left to itself",
        (f"{MEMBERSHIP}:on_time", "if state.generation is not None and", "if state.generation is None and"),
    ),
    plant(
        "who comes back is said to have left",
        (f"{MEMBERSHIP}:join", "state.departed.discard(event.name)", "pass"),
    ),
    plant(
        "hosts of a policy replica that is gone are still mapped",
        (f"{MEMBERSHIP}:lose", "relays.follow_policy(state)", "pass"),
    ),
)
