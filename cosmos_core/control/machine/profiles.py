"""Profiles: processes of a pool trace their next steps, because a person asked for it. One goes on at a time."""

from __future__ import annotations

from cosmos_core.control.machine.state import Profiling, Replica, State
from cosmos_core.transport.addresses import split_places
from cosmos_core.transport.directives import ProfileOrder
from cosmos_core.transport.messages import Profile, Role
from cosmos_core.transport.reports import Profiled


def refusal(state: State, request: Profile) -> str:
    """Say why nothing can be traced; empty if it can."""
    if request.steps < 1:
        return f"a profile of {request.steps} steps: ask for 1 or more"
    if state.profile is not None and state.profile.orders:
        return f"a profile goes on ({', '.join(state.profile.orders)}); ask again once it has ended"
    processes = _processes(state, request.role)
    if absent := [rank for rank in request.ranks if rank >= len(processes)]:
        there = ", ".join(f"{rank} ({name})" for rank, (name, _) in enumerate(processes))
        return f"no rank {absent[0]} among the {request.role} processes, which are {there or 'none'}"
    if not request.ranks:
        return "a profile of no rank: name at least one"
    if request.role == "policy" and _first(state) > state.settings.last_step:
        return f"no step is left to trace: the run has {state.settings.last_step}"
    return ""


def take(state: State, ident: str, request: Profile) -> None:
    """Let the processes trace."""
    processes = _processes(state, request.role)
    chosen = [processes[rank] for rank in sorted(set(request.ranks))]
    orders = {
        name: ProfileOrder(
            ident=ident,
            first=_first(state),
            steps=request.steps,
            ranks=tuple(own for replica, own in chosen if replica == name),
        )
        for name, _ in chosen
    }
    state.profile = Profiling(ident=ident, orders=orders)
    state.touched.update(orders)


def order_of(state: State, name: str) -> ProfileOrder | None:
    """Steps that a replica has yet to trace; None if there are none."""
    return None if state.profile is None else state.profile.orders.get(name)


def on_profiled(state: State, replica: Replica, report: Profiled) -> None:
    """A replica has traced what it could."""
    if state.profile is not None and state.profile.ident == report.ident:
        state.profile.traces.extend(report.traces)
        settle(state, replica.name, report.problem)


def settle(state: State, name: str, problem: str) -> None:
    """Nothing more comes of a replica."""
    if state.profile is not None and state.profile.orders.pop(name, None) is not None:
        state.touched.add(name)
        if problem:
            state.profile.problems[name] = problem


def _first(state: State) -> int:
    """The first step that has not been ordered."""
    return state.step + 1 + (state.running is not None)


def _processes(state: State, role: Role) -> list[tuple[str, int]]:
    """Each process of a pool by its rank: its replica, and its rank in that."""
    replicas = sorted(state.named(role), key=lambda replica: (len(replica.name), replica.name))
    return [
        (replica.name, own)
        for replica in replicas
        # Each process of a policy replica serves weights; of an engine's processes the replica is one.
        for own in range(max(1, len(split_places(replica.endpoints.get("weights", ""), ""))))
    ]
