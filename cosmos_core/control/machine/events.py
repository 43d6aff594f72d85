"""Everything that can happen to a run. The journal is a list of these, and the state their fold."""

from __future__ import annotations

from typing import Final, TypeAlias, get_args

import attrs

from cosmos_core.control.machine.settings import Settings
from cosmos_core.transport.codec import Codec
from cosmos_core.transport.messages import Role


@attrs.frozen(kw_only=True)
class RunOpened:
    """The journal begins."""

    settings: Settings


@attrs.frozen(kw_only=True)
class Recovered:
    """The journal begins in the place of one that could not be read any more; `snapshot` is encoded (`snapshot`)."""

    snapshot: bytes
    checkpoint: str
    """Of the snapshot's step."""


@attrs.frozen(kw_only=True)
class ControllerStarted:
    """A controller took the journal over; whatever carries an older term comes from before."""

    term: int


@attrs.frozen(kw_only=True)
class Resumed:
    """The run goes on from the checkpoint of `step`: what came after that step did not happen."""

    step: int
    settings: Settings


@attrs.frozen(kw_only=True)
class RolledBack:
    """All policy replicas are gone, and the run goes on from the checkpoint of `step`, or of 0 from its beginning.

    What came after that step did not happen, and is no part of the run any more; rollout replicas are still there.
    """

    step: int


@attrs.frozen(kw_only=True)
class ReplicaJoined:
    """A replica said hello and was welcomed; fields as in `messages.Hello`."""

    name: str
    role: Role
    incarnation: str
    host: str
    pid: int
    step: int
    endpoints: dict[str, str]
    rack: str = ""


@attrs.frozen(kw_only=True)
class ReplicaLost:
    """A replica was silent for too long, or another process took its name."""

    name: str
    incarnation: str
    reason: str


@attrs.frozen(kw_only=True)
class Reported:
    """A replica reported something; `report` is the message as it came (`transport.reports.REPORT`)."""

    name: str
    incarnation: str
    sequence: int
    report: bytes


@attrs.frozen(kw_only=True)
class Commanded:
    """A person asked for something; `request` is the message as it came (`transport.messages.REQUEST`)."""

    ident: str
    request: bytes


@attrs.frozen(kw_only=True)
class RegroupDue:
    """The pause after a broken gradient group is over."""


@attrs.frozen(kw_only=True)
class GroupStalled:
    """The members of a gradient group wait for each other, and none of them has got on for `timeout_s`."""

    generation: int
    timeout_s: float


@attrs.frozen(kw_only=True)
class JoinTimedOut:
    """Replicas without which the run cannot go on did not appear in time."""

    timeout_s: float


@attrs.frozen(kw_only=True)
class RunEnded:
    """The last entry of a run: every replica was told to stop, or was given up on."""

    outcome: str
    reason: str


Event: TypeAlias = (
    RunOpened
    | Recovered
    | ControllerStarted
    | Resumed
    | RolledBack
    | ReplicaJoined
    | ReplicaLost
    | Reported
    | Commanded
    | RegroupDue
    | GroupStalled
    | JoinTimedOut
    | RunEnded
)

EVENTS: Final = Codec(get_args(Event))
"""Of the journal, and of the entries of `messages.Notices`."""
