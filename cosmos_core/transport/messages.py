"""Messages of the control plane: small attrs records, encoded by msgspec.

Up, a replica sends `Hello` until welcomed, then `Beat` (unreliable) and `Report`s (reliable: numbered per
incarnation, resent until acknowledged). Down, the controller sends `Directive`s: the whole desired state of that
replica, re-sent until it holds, so none of them needs to arrive.

Fences: `term` counts the controller's starts and never comes again, `incarnation` is random per process, `generation`
counts the memberships of the gradient group, a `lease` names one attempt at one prompt.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

import attrs

from cosmos_core.config.dynamic import DynamicKey
from cosmos_core.transport.codec import Codec
from cosmos_core.transport.directives import PolicyDirective, RolloutDirective
from cosmos_core.types import Scalar
from cosmos_core.types.bounds import Address, Count, Finite, Step, Text, Word

WIRE_VERSION = 4

Role: TypeAlias = Literal["policy", "rollout"]


# -- up --------------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Hello:
    """Ask to join. `endpoints` are where this replica serves others, by purpose: `payloads`, `weights`, `store`.

    Of a replica of several processes, each serves the weights that it holds (see `transport.addresses`).
    """

    wire: Count
    run_id: Word
    name: Word
    role: Role
    incarnation: Word
    host: Word
    pid: Count
    step: Step
    """Policy: the step its weights are of. Rollout: 0."""
    endpoints: dict[Word, Address]
    rack: Word = ""
    """What has a faster network inside than outside, as the host is labelled (`COSMOS_RACK`); empty: not known."""
    facts: dict[str, str] = attrs.field(factory=dict)
    """What it is made of and must have in common with the run (`config.fingerprint`); empty: it does not say."""


@attrs.frozen(kw_only=True)
class Beat:
    """Alive, and how it goes; also acknowledges directives."""

    name: Word
    incarnation: Word
    term: Count
    revision: Count
    """Newest directive seen."""
    gauges: dict[Word, Finite]
    progress: Count = 0
    """Another number after each bit of work."""
    doing: Word = ""
    """What it works on; empty if it has nothing to do. With work and without progress for too long, it hangs."""
    waits: bool = False
    """Whether it does no more than wait for other replicas."""


@attrs.frozen(kw_only=True)
class Reports:
    """Reports `first`, `first + 1`, …; contiguous per incarnation, from 1."""

    name: Word
    incarnation: Word
    term: Count
    first: Count
    reports: tuple[bytes, ...]
    """Each an encoded `Report` (`cosmos_core.transport.codec`), so that the journal keeps them as they came."""


@attrs.frozen(kw_only=True)
class Watch:
    """An observer has the journal up to event `after`, and wants what follows.

    It says so again for every few messages that it took, which lets the next ones come, and when nothing came.
    """

    run_id: Word
    after: Count
    again: bool = False
    """Whether what was sent of that got lost."""


@attrs.frozen(kw_only=True)
class Command:
    """A person's request, to be repeated until it is answered: it is carried out once, however often it comes."""

    run_id: Word
    ident: Word
    """Random, of this request."""
    request: bytes
    """An encoded `requests.Request`, so that the journal keeps it as it came."""


@attrs.frozen(kw_only=True)
class Inquire:
    """A person wants to know what can be set in the run; answered with `Settable`."""

    run_id: Word


Up: TypeAlias = Hello | Beat | Reports | Watch | Command | Inquire


# -- down ------------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Welcome:
    """The hello was accepted; reports up to `acknowledged` of this incarnation are durable."""

    term: int
    acknowledged: int


@attrs.frozen(kw_only=True)
class Refused:
    """The hello, or the replica itself, is not wanted (any more); it ends with this reason."""

    reason: str
    is_final: bool = False
    """Whether another process in its place would be refused as well."""


@attrs.frozen(kw_only=True)
class Directive:
    """Desired state, numbered; anything not newer than the last seen of this term is ignored."""

    term: int
    revision: int
    acknowledged: int
    rollout: RolloutDirective | None = None
    policy: PolicyDirective | None = None


@attrs.frozen(kw_only=True)
class Acknowledged:
    """Reports up to this number are durable."""

    term: int
    acknowledged: int


@attrs.frozen(kw_only=True)
class Notices:
    """For observers: journal entries, each (sequence number, unix time, encoded event)."""

    entries: tuple[tuple[int, float, bytes], ...]
    last: int
    """Number of the journal's newest entry."""
    gauges: dict[str, dict[str, float]]
    """Newest gauges of each replica, and of the controller under `controller`."""


@attrs.frozen(kw_only=True)
class Answer:
    """A person's request was taken in and is durable, or was refused and changed nothing."""

    ident: str
    refusal: str = ""
    """Why it cannot be; empty: it was taken in."""


@attrs.frozen(kw_only=True)
class Settable:
    """The keys that can be set in the run, as it is now."""

    step: int
    """The next step that has not been ordered: what is set now holds from it on."""
    keys: tuple[DynamicKey, ...]
    fixed: dict[str, str]
    """Keys that declare themselves dynamic and cannot change in this run, and why."""
    values: dict[str, Scalar]
    """Of the keys that are not as in the recipe at that step."""
    since: dict[str, int]
    """Of each key that was ever changed, the first step that goes by its newest value."""


Down: TypeAlias = Welcome | Refused | Directive | Acknowledged | Notices | Answer | Settable

UP: Final = Codec(get_args(Up))
"""What replicas and observers send to the controller."""

DOWN: Final = Codec(get_args(Down))
"""What the controller sends."""


@attrs.frozen(kw_only=True)
class Stop:
    """End the run with a checkpoint at the next step boundary."""


@attrs.frozen(kw_only=True)
class Drain:
    """Let a replica finish what it has begun, and leave; nothing else is lost with it."""

    name: Word


@attrs.frozen(kw_only=True)
class Set:
    """Change dynamic keys of the recipe, all at one step boundary: the next step that has not been ordered."""

    overrides: tuple[Word, ...]
    """Each `KEY=VALUE`, as of `--set`."""


@attrs.frozen(kw_only=True)
class Lost:
    """Take a replica for lost at once: whoever started its process saw it end, and silence would tell it later."""

    name: Word
    incarnation: Word
    reason: Text


@attrs.frozen(kw_only=True)
class Profile:
    """Trace the next steps of some processes of a pool, of its replicas or of their engines."""

    role: Role
    ranks: tuple[Count, ...]
    """Of the pool's processes, counted through, those of one replica after those of another."""
    steps: Count


Request: TypeAlias = Stop | Drain | Set | Lost | Profile

REQUEST: Final = Codec(get_args(Request))
"""A person's request, as it lies in `Command.request` and in the journal."""
