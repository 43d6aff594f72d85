"""Brings the engine to the weights that the controller wants, while generation goes on until the copy."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import attrs

from cosmos_core.errors import AttestationError, TransportError, WeightSyncError
from cosmos_core.protocols import CachePolicy, RolloutEngine
from cosmos_core.rollout.relay import Copy, Relay
from cosmos_core.rollout.version_lock import VersionLock
from cosmos_core.threads import SupervisedThread
from cosmos_core.transport.directives import Relaying, WeightTarget
from cosmos_core.transport.reports import Report, WeightsLoaded, WeightsRejected
from cosmos_core.weights.digest import Arrivals
from cosmos_core.weights.fetch import Fetch
from cosmos_core.weights.receiver import WeightReceiver
from cosmos_core.weights.shards import EngineLayout
from cosmos_core.weights.snapshot import Base

_LOG: Final = logging.getLogger(__name__)

_TIMEOUT_S: Final = 300.0
"""Until the sources have said what they hold of a version."""
_RETRY_S: Final = (0.1, 0.5, 2.0)
_ALONE: Final = Relaying()
_PATIENCE_S: Final = 120.0
"""How long one version may fail to load, again and again, before the replica gives up."""


@attrs.define(kw_only=True, eq=False)
class _Load:
    """A version that is being loaded.

    Attributes:
        target: The version, and who has it.
        is_relayed: Whether other rollout replicas give it.
        pieces: What is fetched.
        copy: What is kept of it for others.
        arrivals: What arrived, where it is to be checked tensor by tensor.
        base: Where what arrives is kept for the next version to be made of.
        nbytes: What arrived so far.
        num_rollbacks: How often the run had been taken back when its target was given.
    """

    target: WeightTarget
    is_relayed: bool
    pieces: Fetch
    copy: Copy
    arrivals: Arrivals | None
    base: Base | None
    num_rollbacks: int
    nbytes: int = 0


@attrs.define(eq=False, slots=False)
class WeightSync:
    """Fetches each new target into the engine on a thread of its own, and reports what is loaded.

    Weights whose digest is not the target's are never served: the engine stays paused and the fetch is repeated until
    it is right, or until the replica has failed for `patience_s` to load that version. From the second attempt on,
    what arrives is checked tensor by tensor before it is loaded, which tells what is wrong. An engine that cannot
    take weights while sequences are in flight finishes them first.

    A replica that reads from another one waits for that to have the version, `relay_timeout_s` for each replica between
    it and the policy, and reads from the policy itself after that, and after any failure. What is stored comes last.

    With `base`, a copy of what is loaded is kept there, and only changes of it are fetched; all after an attempt
    that failed.

    Attributes:
        transfer_s: How long it took to fetch the newest version.
        loading: The version that is being loaded; -1: none.
        num_pieces: Slices that arrived, and attempts that ended.
    """

    _engine: RolloutEngine
    _receiver: WeightReceiver
    _version_lock: VersionLock
    _cache: CachePolicy
    _in_flight_update: bool
    _report: Callable[[Report], None]
    _relay: Relay
    _relay_timeout_s: float
    _patience_s: float = _PATIENCE_S
    _base: Base | None = None

    def __attrs_post_init__(self) -> None:
        self._changed = threading.Condition()
        self._target: WeightTarget | None = None
        self._relaying = Relaying()
        self._waiting_since: float | None = None
        self._has_failed = False
        """Whether the last attempt to load failed."""
        self._closed = False
        self._doubted = -1
        """The version that was loaded with another digest than its own, last."""
        self._swapping = threading.Lock()
        self._awake = threading.Lock()
        """Held while something is being loaded, and for as long as the engine sleeps."""
        self._is_resting = False
        self._rollbacks: tuple[int, ...] = ()
        self._thread = SupervisedThread("weights", self._run)
        self.transfer_s = 0.0
        self.loading = -1
        self.num_pieces = 0

    def start(self) -> None:
        """Begin to wait for targets."""
        self._thread.start()

    def close(self) -> None:
        """Stop; a transfer under way is given a moment to end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._is_resting:
            self.rise()
        self._version_lock.close()
        self._thread.join(5.0)

    def rest(self) -> None:
        """Load nothing, not even what is being loaded, until `rise`; the engine is about to have no weights."""
        self._is_resting = True
        self._awake.acquire()
        self._version_lock.revoke()

    def rise(self) -> None:
        """Load again."""
        self._awake.release()
        with self._changed:
            self._is_resting = False
            self._changed.notify_all()

    def check(self) -> None:
        """Raise what ended the thread, if it failed or gave up."""
        self._thread.check()

    def aim(self, target: WeightTarget | None, relaying: Relaying = _ALONE, rollbacks: Sequence[int] = ()) -> None:
        """Load this target next, unless it is loaded (None: nothing yet), and keep those that others read from here.

        What was loaded of steps later than one of the `rollbacks`, to which the run was taken back, is given up; the
        engine is paused then until it has loaded something else. `relaying` is this replica's place among those that
        pass weights on.
        """
        # Both at once: who takes a target takes the number of rollbacks that it was given with.
        with self._swapping, self._changed:
            for step in rollbacks[len(self._rollbacks) :]:
                self._give_up_after(step)
            self._rollbacks = tuple(rollbacks)
            if (target, relaying) != (self._target, self._relaying):
                self._target, self._relaying = target, relaying
                self._changed.notify_all()
        self._relay.retain(relaying.retain, keep=relaying.keep)

    def _run(self) -> None:
        failures, version, since = 0, -1, 0.0
        while (found := self._next(0.0 if not failures else _RETRY_S[min(failures, len(_RETRY_S)) - 1])) is not None:
            target, is_relayed, num_rollbacks = found
            try:
                with self._awake:
                    self._load(target, is_relayed=is_relayed, num_rollbacks=num_rollbacks)
            except (WeightSyncError, TransportError) as error:
                if self._is_interrupted():
                    continue
                _LOG.warning("weights version %d were not loaded, trying again: %s", target.version, error)
                now = time.monotonic()
                if not failures or target.version != version:
                    failures, version, since = 0, target.version, now
                failures += 1
                if now - since > self._patience_s:
                    raise WeightSyncError(
                        f"weights version {version} could not be loaded in {failures} attempts over {now - since:.0f} "
                        f"s; the last one: {error}"
                    ) from error
            else:
                failures = 0
            finally:
                self.loading = -1
                self.num_pieces += 1
            self._has_failed = failures > 0

    def _next(self, delay_s: float) -> tuple[WeightTarget, bool, int] | None:
        """The next load: target, whether rollout replicas give it, and how often the run was rolled back before.

        After a delay; None at the end.
        """
        with self._changed:
            if delay_s:
                self._changed.wait_for(lambda: self._closed, delay_s)
            while not self._closed:
                found, wait_s = (None, None) if self._is_resting else self._due(time.monotonic())
                if found is not None:
                    return *found, len(self._rollbacks)
                self._changed.wait(wait_s)
            return None

    def _due(self, now: float) -> tuple[tuple[WeightTarget, bool] | None, float | None]:
        """The target to load now, and whether others pass it on; if none, in how many seconds that may change."""
        relaying, reserve = self._relaying, self._newer(self._relaying.reserve)
        target = self._newer(self._target)
        if target is not None:
            known = relaying.reserve
            is_relayed = relaying.level > 0 and (known is None or target.sources != known.sources)
            if not (is_relayed and self._has_failed and reserve is not None):
                self._waiting_since = None
                return (target, is_relayed), None
        if reserve is None:
            self._waiting_since = None
            return None, None
        if self._waiting_since is None:
            self._waiting_since = now
        wait_s = self._waiting_since + relaying.level * self._relay_timeout_s - now
        if wait_s > 0 and not self._has_failed:
            return None, wait_s
        self._waiting_since = None
        why = "another replica could not pass them on" if self._has_failed else "no replica passed them on in time"
        _LOG.warning("weights version %d are read from the policy itself: %s", reserve.version, why)
        return (reserve, False), None

    def _newer(self, target: WeightTarget | None) -> WeightTarget | None:
        """The target, if it is newer than what is loaded."""
        return target if target is not None and target.version > self._version_lock.loaded else None

    def _is_interrupted(self) -> bool:
        return self._closed or self._is_resting

    def _load(self, target: WeightTarget, *, is_relayed: bool, num_rollbacks: int) -> None:
        if self._is_interrupted():
            return
        begin, self.loading = time.monotonic(), target.version
        self._engine.begin_update(target.version)
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self._engine.abort_update)
            layout = self._engine.layout()
            copy = cleanup.enter_context(self._relay.copying(target.version, layout, keep=self._relaying.keep))
            # What the policy has comes before what is stored: that it has failed to give it is not known yet.
            is_last = not is_relayed or self._newer(self._relaying.reserve) is None
            pieces = cleanup.enter_context(
                self._receiver.fetch(
                    target, layout, _TIMEOUT_S, falls_back=is_last, base=self._base, interrupted=self._is_interrupted
                )
            )
            base = self._base_for(target, pieces, layout)
            arrivals = Arrivals(pieces.digests, layout) if self._doubted == target.version else None
            is_relayed = is_relayed and not pieces.is_stored
            load = _Load(
                target=target,
                is_relayed=is_relayed,
                pieces=pieces,
                copy=copy,
                arrivals=arrivals,
                base=base,
                num_rollbacks=num_rollbacks,
            )
            for rank, piece, data in pieces:
                if self._is_interrupted():
                    break
                self._engine.write(rank, piece, data)
                copy.write(piece, data)
                if base is not None:
                    base.write(piece, data)
                load.nbytes += data.nbytes
                self.num_pieces += 1
                if arrivals is not None:
                    arrivals.add(rank, piece, data)
            if self._is_interrupted():
                return
            if arrivals is not None and (wrong := arrivals.first_wrong()):
                reason = f"{wrong}: what arrived is not what was published; its source, its file or the wire is bad"
                self._report(WeightsRejected(version=target.version, digest="", expected=target.digest, reason=reason))
                raise WeightSyncError(reason)
            self.transfer_s = time.monotonic() - begin
            with self._version_lock.changing(target.version, self._is_interrupted) as may_change, self._swapping:
                if may_change:
                    self._commit(load)

    def _base_for(self, target: WeightTarget, pieces: Fetch, layout: EngineLayout) -> Base | None:
        """The base that keeps what arrives, to make the next version from; None if no process will send that."""
        if self._base is None:
            return None
        if not pieces.is_asked:
            self._base.close()
            return None
        self._base.begin(target.version, layout)
        return self._base

    def _give_up_after(self, step: int) -> None:
        """The run was taken back to a step: what is loaded, and kept, of a later one was never part of it."""
        self._relay.drop_after(step)
        if self._version_lock.loaded > step:
            _LOG.warning(
                "giving up weights version %d: the run was taken back to step %d", self._version_lock.loaded, step
            )
            # What is in flight is not leased any more, and is ended before anything is generated again.
            self._engine.pause("keep")
            self._version_lock.revoke()

    def _refuse(self, target: WeightTarget, digest: str, reason: str, arrivals: Arrivals | None) -> None:
        """Serve nothing: what is loaded is not what was published."""
        if arrivals is not None:
            reason = f"{reason}; {_arrived(arrivals)}"
        self._doubted = target.version
        self._version_lock.revoke()
        self._report(WeightsRejected(version=target.version, digest=digest, expected=target.digest, reason=reason))

    def _commit(self, load: _Load) -> None:
        target, arrivals = load.target, load.arrivals
        if any(target.version > step for step in self._rollbacks[load.num_rollbacks :]):
            raise WeightSyncError(f"the run was taken back to before version {target.version} while it was loaded")
        paused_at = time.monotonic()
        self._engine.pause("keep" if self._in_flight_update else "wait")
        try:
            digest = self._engine.commit_update(self._cache)
        except AttestationError as error:
            self._refuse(target, "", str(error), arrivals)
            raise
        except WeightSyncError:
            if self._version_lock.loaded >= 0:  # nothing was copied: what was attested before still is
                self._engine.resume()
            raise
        if digest != target.digest:
            reason = f"what was loaded has the digest {digest}, what was published {target.digest}"
            self._refuse(target, digest, reason, arrivals)
            raise WeightSyncError(reason)
        self._version_lock.confirm(target.version)
        if load.base is not None:
            load.base.confirm(target.version, digest)
        self._engine.resume()
        paused_s = time.monotonic() - paused_at
        if load.pieces.num_whole:
            _LOG.warning(
                "weights version %d: %d answers came whole, as their sources have no more what was loaded before",
                target.version,
                load.pieces.num_whole,
            )
        self._report(
            WeightsLoaded(
                version=target.version,
                digest=digest,
                transfer_s=self.transfer_s,
                paused_s=paused_s,
                nbytes=load.nbytes,
                relayed=load.nbytes if load.is_relayed else 0,
                spared=load.pieces.spared,
                endpoint=load.copy.serve(load.pieces.digests),
            )
        )


def _arrived(arrivals: Arrivals) -> str:
    """Say what is known of slices none of which is known to be wrong."""
    unchecked = arrivals.unchecked()
    if not unchecked:
        return "all that arrived was right, so that it went wrong in the engine"
    return (
        f"what arrived could not be checked of {len(unchecked)} tensors, as ranks hold different parts of them (the "
        f"first is {unchecked[0]}), and was right of all others: it went wrong on the way or in the engine"
    )
