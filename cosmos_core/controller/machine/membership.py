"""Who is in the run: joining, losing, and the generations of the gradient group."""

from __future__ import annotations

from cosmos_core.controller.machine import claim, dispatch, evaluation, publication, relays
from cosmos_core.controller.machine.events import ReplicaJoined
from cosmos_core.controller.machine.state import Generation, Replica, State
from cosmos_core.transport.directives import GenerationOrder
from cosmos_core.transport.reports import GenerationFailed, GenerationFormed, StepFailed


def join(state: State, event: ReplicaJoined) -> None:
    """Take a replica in; another process of the same name is lost with that."""
    present = state.replicas.get(event.name)
    if event.incarnation in state.fenced or (present is not None and present.incarnation == event.incarnation):
        return
    if present is not None:
        lose(state, present, "another process took its name")
    state.replicas[event.name] = Replica(
        name=event.name,
        role=event.role,
        incarnation=event.incarnation,
        host=event.host,
        pid=event.pid,
        endpoints=event.endpoints,
        step=event.step,
        rack=event.rack,
    )
    if event.role == "rollout":
        state.has_rollouts = state.has_rollouts or len(state.named("rollout")) >= state.settings.num_rollouts
    relays.arrange(state)
    state.touch()


def lose(state: State, replica: Replica, reason: str) -> None:
    """Take a replica out, for good: its process may not come back."""
    del state.replicas[replica.name]
    state.fenced[replica.incarnation] = f"{replica.name}: {reason}"
    if replica.role == "rollout":
        dispatch.lost_with(state, replica)
    else:
        publication.drop_source(state, replica.name)
        generation = state.generation
        if generation is not None and replica.name in generation.order.members:
            state.generation = None
        if state.has_started and not state.named("policy"):
            state.fail(f"the last policy replica was lost ({replica.name}: {reason}); resume from the last checkpoint")
    relays.arrange(state)
    evaluation.abandon(state)
    state.touch()


def regroup(state: State) -> None:
    """Order a new generation where the membership has changed; a joiner waits for the step boundary."""
    policies = state.named("policy")
    if not state.has_started:
        if len(policies) < state.settings.num_policies:
            return
        state.has_started = True
    names = tuple(policy.name for policy in policies)
    generation = state.generation
    if generation is not None:
        is_working = not generation.is_ready or state.running is not None
        is_closing = state.is_stopping or state.is_trained
        if is_working or is_closing or generation.order.members == names:
            return
    if state.is_regrouping or not policies:
        return
    steps = [policy.step for policy in policies]
    state.generation_number += 1
    order = GenerationOrder(
        generation=state.generation_number,
        members=names,
        store=policies[0].endpoints.get("store", ""),
        source=steps.index(max(steps)),
        transfer=len(set(steps)) > 1,
    )
    state.generation = Generation(order=order)
    state.touch("policy")


def on_formed(state: State, replica: Replica, report: GenerationFormed) -> bool:
    """A member is ready.

    Returns:
        Whether with it all are, and already hold the weights of the running step, so that it is done.
    """
    replica.step = report.step
    generation = state.generation
    if generation is None or generation.order.generation != report.generation:
        return False
    generation.formed[replica.name] = report.step
    if set(generation.formed) != set(generation.order.members):
        return False
    return _settle(state, generation)


def on_broken(state: State, report: GenerationFailed | StepFailed) -> None:
    """The gradient group of a generation failed somewhere, or could not apply a step."""
    if state.generation is not None and state.generation.order.generation == report.generation:
        break_up(state, report.reason)


def break_up(state: State, reason: str) -> None:
    """Give the present generation up; the next one is formed after a pause, so that failures cannot spin."""
    state.status_details["generation"] = reason
    state.generation = None
    state.is_regrouping = True
    state.num_regroups += 1
    if state.num_regroups > claim.MAX_ATTEMPTS:
        state.fail(f"the gradient group broke {state.num_regroups} times in a row; last: {reason}")
    state.touch("policy")


def missing(state: State) -> list[str]:
    """Replicas without which the run cannot go on, for people."""
    wanted = []
    settings = state.settings
    if not state.has_started:
        joined = len(state.named("policy"))
        wanted.append(f"{settings.num_policies - joined} of {settings.num_policies} policy replicas")
    if settings.num_rollouts:
        joined = len(state.named("rollout"))
        least = 1 if state.has_rollouts else settings.num_rollouts
        if joined < least:
            wanted.append(f"{least - joined} of {settings.num_rollouts} rollout replicas")
    return wanted


def _settle(state: State, generation: Generation) -> bool:
    steps = set(generation.formed.values())
    running = state.running
    if len(steps) > 1:
        # Somebody was further than it had told when the order was made: order again, from what is known now.
        for name, step in generation.formed.items():
            state.replicas[name].step = step
        break_up(state, f"members hold the weights of different steps: {sorted(steps)}")
        state.is_regrouping = False
        return False
    (step,) = steps
    generation.is_ready = True
    state.num_regroups = 0
    state.touch("policy")
    if step == state.step:
        if running is not None:
            claim.repeat(state)
        return False
    if running is not None and step == running.order.step:
        return True
    held = f"the weights of step {step}" if step >= 0 else "weights whose transfer broke off"
    state.fail(
        f"the policy replicas hold {held}, but the run is at step {state.step}; "
        f"resume from a checkpoint with --resume (checkpoints: {sorted(state.checkpoints.saved) or 'none'})"
    )
    return False
