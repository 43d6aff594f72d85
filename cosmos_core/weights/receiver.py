"""Fetches a version of the weights: mapped on one host, else slice by slice from several publishers, or from a disk."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

import attrs
import zmq

from cosmos_core.errors import TransportError, WeightSyncError
from cosmos_core.transport import sockets
from cosmos_core.transport.addresses import without_key
from cosmos_core.transport.authentication import Keyring
from cosmos_core.transport.directives import WeightTarget
from cosmos_core.transport.sockets import Closing
from cosmos_core.weights import digest, wire
from cosmos_core.weights.disk import stored_parts
from cosmos_core.weights.fetch import Fetch, Ready, Source, plan_of, problems, read_mapped, wait
from cosmos_core.weights.planner import Plan, check_agreement
from cosmos_core.weights.process_group import ProcessGroupTransport
from cosmos_core.weights.shards import EngineLayout, ShardMap
from cosmos_core.weights.shared_memory import map_shared
from cosmos_core.weights.snapshot import Base
from cosmos_core.weights.topology import Place

_LOGGER: Final = logging.getLogger(__name__)
_NAMED: Final = 4
"""Most sources that a line of the log names."""

Transport: TypeAlias = Literal["auto", "shared-memory", "disk"] | wire.Network


class _Patience(NamedTuple):
    """Seconds after which all sources, and each of them, are given up if they have not answered, or at once."""

    all_s: float
    stall_s: float
    interrupted: Callable[[], bool]


@attrs.define(eq=False)
class WeightReceiver(Closing):
    """Fetches weights for one rollout replica; used by one thread at a time.

    Connections are made per fetch. A process group with a publisher stays for the next one, as long as that is one of
    the sources, and nothing has failed in it.

    Attributes:
        transport: `auto` maps files of publishers on `host`, asks others over ZeroMQ, and reads what is stored in
            `directory` if they cannot give the version. The others are that one way alone.
        run_id: The run's id; publishers of other runs refuse.
        host: This host, as in `Hello.host`.
        rack: The label of its rack, as in `Hello.rack`; those in the same one are asked before others.
        stall_s: Silence after which a publisher counts as stalled, and others are asked instead.
        directory: Where versions are stored, if they are.
        keyring: Keys of this process; None only in tests and measurements.
        name: The replica's: publishers give up a process group with an earlier process of it. Empty for none.
    """

    _transport: Transport = "auto"
    _run_id: str = attrs.field(kw_only=True)
    _host: str = attrs.field(kw_only=True)
    _rack: str = attrs.field(default="", kw_only=True)
    _stall_s: float = attrs.field(default=5.0, kw_only=True)
    _directory: str | None = attrs.field(default=None, kw_only=True)
    _keyring: Keyring | None = attrs.field(default=None, kw_only=True)
    _name: str = attrs.field(default="", kw_only=True)
    _context: sockets.Context = attrs.field(factory=zmq.Context, init=False)
    _pairs: dict[str, ProcessGroupTransport] = attrs.field(factory=dict, init=False)

    @property
    def _network(self) -> wire.Network:
        return self._transport if self._transport in {"gloo", "nccl"} else "zmq"

    @property
    def _place(self) -> Place:
        return Place(host=self._host, rack=self._rack)

    @contextlib.contextmanager
    def fetch(
        self,
        target: WeightTarget,
        layout: EngineLayout,
        timeout_s: float,
        *,
        ranks: Collection[int] | None = None,
        falls_back: bool = True,
        base: Base | None = None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Iterator[Fetch]:
        """Connect to the target's sources and yield the slices of `layout` as a `Fetch`.

        Where each rank of a replica fetches for itself, they share the work as one that fetched for all would.

        Args:
            target: The version and who has it.
            layout: What each rank holds (`RolloutEngine.layout`).
            timeout_s: Most seconds until the sources have said what they hold. Slices may take as long as they need,
                as long as sources are not silent (`stall_s`).
            ranks: The ranks for which to fetch; all of the layout if absent.
            falls_back: Whether to read what is stored, if there is any, where the target's sources cannot give it.
            base: What the replica has loaded; over ZeroMQ only what changed since then is sent, where the source can.
                It may be written while slices arrive, with these.
            interrupted: Whether to wait for the sources no longer: slices end then, and not all have come.
        """
        stall_s = min(self._stall_s, timeout_s / 2)
        wanted = ShardMap.of_layout(layout)
        found: list[Source] = []
        try:
            patience = _Patience(timeout_s, stall_s, interrupted)
            ready, plan = self._find(target, found, wanted, patience, falls_back=falls_back, base=base)
            _LOGGER.info("weights version %d comes %s", target.version, self._how(ready))
            yield Fetch(
                version=target.version,
                wanted=wanted,
                ready=ready,
                plan=plan,
                place=self._place,
                stall_s=stall_s,
                ranks=frozenset(layout if ranks is None else ranks),
                interrupted=interrupted,
            )
        finally:
            for source in found:
                source.close()

    def close(self) -> None:
        """Release the sockets and process groups. Idempotent."""
        self._leave_all_but(())
        self._context.destroy(linger=0)

    def _leave_all_but(self, endpoints: Collection[str]) -> None:
        """Leave the process groups with all other publishers; these hear of it, or give them up in time."""
        for endpoint in self._pairs.keys() - set(endpoints):
            self._pairs.pop(endpoint).close()

    def _find(
        self,
        target: WeightTarget,
        found: list[Source],
        wanted: ShardMap,
        patience: _Patience,
        *,
        falls_back: bool,
        base: Base | None,
    ) -> tuple[list[Ready], Plan]:
        """Find the sources and plan what each sends; new connections are put into `found`."""
        if self._transport == "disk":
            return self._stored(target, wanted)
        try:
            self._connect(target, found, patience.stall_s, base)
            return self._gather(target, found, wanted, patience)
        except WeightSyncError as error:
            if self._directory is None or not falls_back:
                raise
            try:
                ready, plan = self._stored(target, wanted)
            except WeightSyncError as other:
                raise WeightSyncError(f"{error}; {other}") from error
            _LOGGER.warning("%s; it is read from %s instead", error, self._directory)
            return ready, plan

    def _stored(self, target: WeightTarget, wanted: ShardMap) -> tuple[list[Ready], Plan]:
        """Plan to read the stored parts of a version; a WeightSyncError if they are not all of it."""
        if self._directory is None:
            raise WeightSyncError("sync.transport 'disk' needs sync.directory: nothing says where versions are stored")
        ready, damaged = stored_parts(self._directory, self._run_id, target)
        found = self._plan(ready, wanted)
        if isinstance(found, Plan):
            return ready, found
        if not damaged:
            raise found
        more = f"; {found}" if ready else ""
        raise WeightSyncError(f"weights version {target.version} cannot be read: {'; '.join(damaged)}{more}")

    def _how(self, ready: Sequence[Ready]) -> str:
        """Describe for the log the transport and the sources of a fetch."""
        mapped = [each for each in ready if each.read is not None]
        if ready[0].source is None:
            return f"from {len(mapped)} part(s) in {self._directory}"
        sent = [each for each in ready if each.read is None]
        ways = [f"through {len(mapped)} mapped file(s) of {_endpoints(mapped)}"] if mapped else []
        ways += [f"over {self._network} from {len(sent)} process(es), {_endpoints(sent)}"] if sent else []
        return " and ".join(ways)

    def _connect(self, target: WeightTarget, found: list[Source], stall_s: float, base: Base | None) -> None:
        racks = target.racks or ("",) * len(target.sources)
        places = list(zip(target.sources, target.hosts, racks, strict=True))
        if self._transport == "shared-memory":
            places = [place for place in places if place[1] == self._place.host]
        if not places:
            raise WeightSyncError(
                f"weights version {target.version}: none of its {len(target.sources)} sources can be used with "
                f"sync.transport {self._transport!r} on host {self._place.host!r} (theirs: {', '.join(target.hosts)})"
            )
        self._leave_all_but(target.sources)
        for endpoint, host, rack in places:
            source = Source(
                self._context,
                endpoint,
                Place(host=host, rack=rack),
                self._run_id,
                network=self._network,
                stall_s=stall_s,
                base=base,
                keyring=self._keyring,
                pairs=self._pairs,
                receiver=self._name,
            )
            found.append(source)
            source.describe(target.version)

    def _gather(
        self, target: WeightTarget, sources: Sequence[Source], wanted: ShardMap, patience: _Patience
    ) -> tuple[list[Ready], Plan]:
        """Wait until the sources that answered can give everything: those on this host alone, if they can."""
        ready: list[Ready] = []
        deadline, is_near_tried = time.monotonic() + patience.all_s, False
        waiting = list(sources)
        while waiting and time.monotonic() < deadline and not patience.interrupted():
            for source in wait(waiting):
                self._learn(source, target, ready)
            # Not as they answered: ranks that fetch for themselves shall plan from the same.
            ready.sort(key=lambda each: sources.index(each.source))
            waiting = [source for source in waiting if source.manifest is None and not source.failure]
            expected = [source for source in waiting if not source.is_stalled]
            if not is_near_tried and not any(self._is_near(source) for source in expected):
                is_near_tried = True
                near = [each for each in ready if each.read is not None]
                found = self._plan(near, wanted)
                if isinstance(found, Plan):
                    return near, found
            if not expected:
                # Whoever asked may know of other sources by now.
                break
        found = self._plan(ready, wanted)
        if isinstance(found, Plan):
            return ready, found
        for source in waiting:
            source.fail(f"no answer for {patience.stall_s:g} s")
        if any(source.failure for source in sources):
            more = f"; {found}" if ready else ""
            raise WeightSyncError(problems(target.version, sources) + more)
        raise found

    def _is_near(self, source: Source) -> bool:
        """True if the source's file is to be mapped on this host."""
        return self._transport in {"auto", "shared-memory"} and source.place.host == self._place.host

    def _plan(self, ready: Sequence[Ready], wanted: ShardMap) -> Plan | WeightSyncError:
        """Plan the transfers, or return why these sources cannot give all that is wanted, and only that."""
        if not ready:
            return WeightSyncError("no source has answered")
        published = {name for each in ready for name in each.manifest.digests}
        try:
            check_agreement([each.shards for each in ready], [wanted], published=published)
            return plan_of(ready, wanted, self._place)
        except WeightSyncError as error:
            return error

    def _learn(self, source: Source, target: WeightTarget, ready: list[Ready]) -> None:
        """Take a source's answer; one that cannot be used fails, with the reason."""
        try:
            source.take()
            manifest = source.manifest
            if manifest is None:
                return
            found = digest.combine(manifest.digests)
        except TransportError as error:
            source.fail(str(error))
            return
        except ValueError as error:
            source.fail(f"what it says of version {target.version} is malformed: {error}")
            return
        if found != target.digest:
            source.fail(f"its version {target.version} has the digest {found}, not {target.digest}")
            return
        if ready:
            # The digest says that they are the same, and of hundreds of sources they would be gigabytes.
            manifest = source.manifest = attrs.evolve(manifest, digests=ready[0].manifest.digests)
        read = None
        if self._is_near(source):
            buffer = map_shared(manifest.path, token=manifest.token, size=manifest.file_bytes)
            if buffer is None and self._transport == "shared-memory":
                source.fail(f"its file {manifest.path} cannot be mapped here; do both processes see that folder?")
                return
            read = None if buffer is None else functools.partial(read_mapped, manifest, buffer)
        ready.append(Ready(source=source, manifest=manifest, shards=manifest.shard_map(), read=read))


def _endpoints(ready: Sequence[Ready]) -> str:
    """The endpoints of the first few of some sources."""
    named = [without_key(each.source.endpoint) for each in ready if each.source is not None]
    return ", ".join(named[:_NAMED]) + (", …" if len(named) > _NAMED else "")
