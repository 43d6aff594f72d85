"""`cosmos profile`: lets processes of a run that goes on trace their next steps, and waits for the files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from cosmos_core.config.job import Job
    from cosmos_core.control.machine.state import Profiling, State
    from cosmos_core.run.observer import Observer
    from cosmos_core.transport.messages import Profile

_SILENCE_S: Final = 30.0
_POLL_S: Final = 0.2


def profile(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    *,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, help="Steps of the policy, or forwards of the engine.")
    ] = 3,
    pool: Annotated[str, typer.Option("--pool", metavar="policy|rollout", help="Whose processes.")] = "policy",
    ranks: Annotated[
        str, typer.Option("--ranks", metavar="N,...", help="Which of them, counted through all replicas of the pool.")
    ] = "0",
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the traces, or go on at once.")] = True,
) -> None:
    """Trace the next steps of processes of a run that goes on, for https://ui.perfetto.dev.

    \b
    Examples:
      cosmos profile runs/arithmetic
      cosmos profile runs/arithmetic --steps 1 --ranks 0,8
      cosmos profile runs/arithmetic --pool rollout --steps 20 --no-wait
    """  # noqa: D301 - the escape keeps the lines after it apart
    from cosmos_core.errors import ConfigError, ReplicaError  # noqa: PLC0415
    from cosmos_core.run.requests import ask  # noqa: PLC0415
    from cosmos_core.transport.messages import Profile  # noqa: PLC0415

    if pool not in ("policy", "rollout"):
        raise ConfigError(f"--pool {pool}: a run has the pools policy and rollout")
    numbers = [word.strip() for word in ranks.split(",")]
    if not all(word.isdecimal() for word in numbers):
        raise ConfigError(f"--ranks {ranks}: numbers from 0 on, with commas between them")
    request = Profile(role="policy" if pool == "policy" else "rollout", ranks=tuple(map(int, numbers)), steps=steps)
    if not wait:
        ask(run, request)
        typer.echo(f"Traces will be in {run}/profiles")
        return
    try:
        done = _follow(run, request)
    except KeyboardInterrupt:
        typer.echo(f"No longer waiting; traces will be in {run}/profiles", err=True)
        return
    for trace in sorted(done.traces, key=lambda trace: (len(trace), trace)):
        typer.echo(run / trace)
    for name, problem in done.problems.items():
        typer.echo(f"{name}: {problem}", err=True)
    if not done.traces:
        raise ReplicaError(f"{run}: nothing was traced")


def _follow(run: Path, request: Profile) -> Profiling:
    """Ask, and wait for the end of what was asked for; what came of it."""
    from cosmos_core.config.loading import load_job  # noqa: PLC0415
    from cosmos_core.errors import ReplicaError  # noqa: PLC0415
    from cosmos_core.run.observer import Observer  # noqa: PLC0415
    from cosmos_core.run.requests import PendingRequests, address_of  # noqa: PLC0415
    from cosmos_core.transport.keys import person_key  # noqa: PLC0415

    job, pending = load_job(run), PendingRequests()
    address = address_of(run, job)
    with Observer(address, job.run_id, person_key(job.keys, may_ask=True)) as observer:
        ident, is_told = pending.add(request), False
        for state, now, is_over in _states(observer, job, address):
            pending.send(observer, now)
            if refusal := observer.answers.get(ident):
                raise ReplicaError(f"{run}: refused: {refusal}")
            found = None if state is None else state.profile
            if found is not None and found.ident == ident:
                if not is_told:
                    is_told = True
                    typer.echo(_words(found, request), err=True)
                if is_over:
                    found.problems |= dict.fromkeys(found.orders, "the run ended before it had traced all")
                if is_over or not found.orders:
                    return found
            elif is_over:
                break
    raise ReplicaError(f"{run}: the run ended before anything was traced")


def _states(observer: Observer, job: Job, address: str) -> Iterator[tuple[State | None, float, bool]]:
    """The run's state after each look at it, the time, and whether the run has ended."""
    import time  # noqa: PLC0415

    from cosmos_core.control.journal import replay  # noqa: PLC0415
    from cosmos_core.control.machine import core  # noqa: PLC0415
    from cosmos_core.errors import ReplicaError  # noqa: PLC0415
    from cosmos_core.run.address import read_address  # noqa: PLC0415
    from cosmos_core.run.folder import is_held  # noqa: PLC0415

    state, began = None, time.monotonic()
    # Whoever has the run starts a controller that is gone again.
    while read_address(job) is not None or is_held(job.directory):
        if found := observer.poll(_POLL_S):
            state = core.fold((event for _, _, event in found), state)
        now = time.monotonic()
        if min(observer.silence_s, now - began) > _SILENCE_S:
            raise ReplicaError(
                f"the controller at {address} has said nothing for {_SILENCE_S:g} s: it hangs, or is gone; traces that "
                "were written lie in the run's profiles/"
            )
        # The end of an earlier session is in the journal, too.
        yield state, now, state is not None and state.has_ended and observer.newest <= observer.last_sequence
    yield replay(job.journal), time.monotonic(), True


def _words(profiling: Profiling, request: Profile) -> str:
    names = ", ".join(profiling.orders)
    first = next((each.first for each in profiling.orders.values()), 0)
    what = f"steps {first} to {first + request.steps - 1}" if request.role == "policy" else f"{request.steps} forwards"
    return f"Tracing {what} of {names}; Ctrl-C ends the waiting alone."
