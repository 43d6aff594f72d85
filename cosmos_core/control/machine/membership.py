"""The members of a run: joining, losing and draining replicas, and the generations of the gradient group.

A replica that drains gets nothing new from the moment it is asked to, and leaves once it has finished what it has
begun: a rollout replica once it works on nothing and no step needs its payloads any more; a policy replica once a
generation without it has formed, at a step's boundary, and nobody can have to read weights from it alone.
"""

from __future__ import annotations

from cosmos_core.control.machine import batch_assembly, dispatch, evaluation, profiles, publication, relays, turns
from cosmos_core.control.machine.events import GroupStalled, JoinTimedOut, RegroupDue, ReplicaJoined
from cosmos_core.control.machine.state import Generation, Replica, State
from cosmos_core.transport.directives import GenerationOrder
from cosmos_core.transport.messages import Role
from cosmos_core.transport.reports import GenerationFailed, GenerationFormed, StepFailed


def join(state: State, event: ReplicaJoined) -> None:
    """Take a replica in; another process of the same name is lost with that."""
    present = state.replicas.get(event.name)
    if event.incarnation in state.fenced or (present is not None and present.incarnation == event.incarnation):
        return
    if present is not None:
        lose(state, present, "another process took its name")
    state.departed.discard(event.name)
    state.enter(
        Replica(
            name=event.name,
            role=event.role,
            incarnation=event.incarnation,
            host=event.host,
            pid=event.pid,
            endpoints=event.endpoints,
            step=event.step,
            rack=event.rack,
        )
    )
    state.touched.add(event.name)
    if event.role == "policy":
        relays.follow_policy(state)
    elif not state.has_rollouts and len(state.members["rollout"]) >= state.settings.rollout_replicas:
        state.has_rollouts = True
        relays.arrange(state)
    else:
        relays.follow(state, event.name)


def lose(state: State, replica: Replica, reason: str) -> None:
    """Take a replica out, for good: its process may not come back. What it had is queued again, or lost."""
    state.remove(replica)
    turns.rest(state, replica.name)
    state.fenced[replica.incarnation] = f"{replica.name}: {reason}"
    profiles.settle(state, replica.name, f"lost before it had traced all: {reason}")
    if replica.role == "rollout":
        dispatch.lost_with(state, replica)
        relays.follow(state, replica.name)
    else:
        publication.drop_source(state, replica.name)
        generation = state.generation
        if generation is not None and replica.name in generation.order.members:
            state.generation = None
        relays.follow_policy(state)
        state.touch("policy")
    evaluation.abandon(state)


def regroup(state: State) -> None:
    """Order a new generation where the membership has changed; a joiner waits for the step boundary."""
    if not state.has_started:
        if len(state.members["policy"]) < state.settings.policy_replicas:
            return
        state.has_started = True
    generation = state.generation
    if generation is not None:
        is_working = not generation.is_ready or state.running is not None
        if is_working or state.is_stopping or state.is_trained:
            return
    elif state.is_regrouping:
        return
    policies = _members(state)
    names = tuple(policy.name for policy in policies)
    if not policies or (generation is not None and generation.order.members == names):
        return
    steps = [policy.step for policy in policies]
    checkpoint = state.checkpoints.saved.get(state.step, "") if max(steps) < state.step else ""
    if max(steps) < state.step and not checkpoint:
        # Nobody has the newest weights: `recovery`. The initial ones every new process has.
        for policy in policies if state.step == 0 else ():
            lose(state, policy, "it holds weights whose transfer broke off")
        return
    state.generation_number += 1
    order = GenerationOrder(
        generation=state.generation_number,
        members=names,
        store=policies[0].endpoints.get("store", ""),
        source=steps.index(max(steps)),
        transfer=len(set(steps)) > 1 and not checkpoint,
        step=state.step,
        checkpoint=checkpoint,
    )
    state.generation = Generation(order=order)
    state.touch("policy")


def on_formed(state: State, replica: Replica, report: GenerationFormed) -> bool:
    """A member is ready; whether with it all are, and already hold the running step's weights, so that it is done."""
    if report.generation <= state.undone:
        return False
    # Of a generation that has been given up since, too: its transfer may have left the newest weights with this one.
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


def on_time(state: State, event: RegroupDue | GroupStalled | JoinTimedOut) -> None:
    """Something has lasted for too long, or for long enough."""
    match event:
        case RegroupDue():
            state.is_regrouping = False
        case GroupStalled():
            # Nobody in the gradient group gets on, and nobody in particular is to blame: it is formed anew.
            if state.generation is not None and state.generation.order.generation == event.generation:
                break_up(state, f"no member made progress for {event.timeout_s:g} s (control.progress_timeout_s)")
        case JoinTimedOut():
            words = _missing_words(state)
            state.fail(f"missing after {event.timeout_s:g} s (control.join_timeout_s): {words}; see their logs")


def break_up(state: State, reason: str) -> None:
    """Give the present generation up; the next one is formed after a pause, so that failures cannot spin."""
    state.status_details["generation"] = reason
    state.generation = None
    state.is_regrouping = True
    state.num_regroups += 1
    if state.num_regroups > batch_assembly.MAX_ATTEMPTS:
        state.fail(f"the gradient group broke {state.num_regroups} times in a row; last: {reason}")
    state.touch("policy")


def missing(state: State) -> dict[Role, tuple[int, int]]:
    """Count, by role, the replicas that are lacking and without which the run cannot go on, and those wanted."""
    wanted: dict[Role, int] = {"policy": state.settings.policy_replicas, "rollout": state.settings.rollout_replicas}
    there = {"policy": state.members["policy"], "rollout": state.members["rollout"] - state.draining}
    least = {role: min(1, number) if state.is_complete(role) else number for role, number in wanted.items()}
    return {
        role: (least[role] - len(there[role]), number)
        for role, number in wanted.items()
        if len(there[role]) < least[role]
    }


def _missing_words(state: State) -> str:
    found = [f"{lacking} of {number} {role} replicas" for role, (lacking, number) in missing(state).items()]
    return " and ".join(found) or "nothing any more"


def refusal(state: State, name: str) -> str:
    """Say why a replica cannot leave; empty if it can."""
    replica = state.replicas.get(name)
    if replica is None:
        words = "has left already" if name in state.departed else "is not in this run"
        return f"{name} {words}, which has {', '.join(sorted(state.replicas)) or 'no replicas'}"
    if not state.is_complete(replica.role):
        return f"the run has not begun, as it waits for {_missing_words(state)}"
    is_needed = replica.role == "policy" or state.settings.rollout_replicas > 0
    if is_needed and not any(other.name != name for other in state.staying(replica.role)):
        return f"{name} is the last {replica.role} replica that stays; start another one first, or end the run"
    return ""


def drain(state: State, name: str) -> None:
    """Let a replica begin nothing any more."""
    replica = state.replicas.get(name)
    if replica is None or name in state.draining:
        return
    state.draining.add(name)
    if replica.role == "rollout":
        relays.follow(state, name)
    state.touched.add(name)


def release(state: State) -> None:
    """Tell those that drain and have nothing left to do to leave."""
    for name in sorted(state.draining):
        replica = state.replicas[name]
        if not replica.is_leaving and _is_free(state, replica):
            replica.is_leaving = True
            state.touched.add(name)


def leave(state: State, replica: Replica) -> None:
    """A replica says that it ends, as it was told to."""
    lose(state, replica, "it has left, as it was asked to")
    state.departed.add(replica.name)


def _members(state: State) -> list[Replica]:
    """The policy replicas that shall train: one that drains stays among them until another has what it has."""
    present = [policy for policy in state.named("policy") if not policy.is_leaving]
    staying = [policy for policy in present if policy.name not in state.draining]
    newest = max((policy.step for policy in present), default=0)
    return staying if any(policy.step == newest for policy in staying) else present


def _settle(state: State, generation: Generation) -> bool:
    running = state.running
    newest = state.step if running is None else running.order.step
    if ahead := {name: step for name, step in generation.formed.items() if step > newest}:
        for name, step in ahead.items():
            lose(state, state.replicas[name], f"it holds the weights of step {step}, but the run is at {state.step}")
        return False
    steps = set(generation.formed.values())
    if len(steps) > 1:
        # Somebody was further than it had told when the order was made: order again, from what is known now.
        for name, step in generation.formed.items():
            state.replicas[name].step = step
        break_up(state, f"members hold the weights of different steps: {sorted(steps)}")
        state.is_regrouping = False
        return False
    (step,) = steps
    is_done = running is not None and step == running.order.step
    if step < state.step:
        break_up(state, f"the members hold the weights of step {step}, and the run is at step {state.step}")
        return False
    generation.is_ready = True
    turns.trust(state)
    state.num_regroups = 0
    state.touch("policy")
    if step == state.step and running is not None:
        batch_assembly.repeat(state)
    return is_done


def _is_free(state: State, replica: Replica) -> bool:
    if replica.role == "rollout":
        return not replica.leases and not replica.held
    generation = state.generation
    if generation is None or not generation.is_ready or replica.name in generation.order.members:
        return False
    return not any(_is_only_source(state, replica, version) for version in state.published)


def _is_only_source(state: State, replica: Replica, version: int) -> bool:
    """True if somebody may have to read a version, and only from those that leave."""
    sources = state.published[version].sources
    if version < state.target or replica.name not in sources or sources - state.draining:
        return False
    return any(rollout.version < version for rollout in state.named("rollout"))
