"""A stand-in for CUDA's streams: each does what it was asked for in turn, as late as may be."""

from __future__ import annotations

import contextlib
import threading

import torch
from torch.utils._pytree import tree_leaves

from cosmos_core.models.parallel import offload
from cosmos_core.weights import snapshot, staging

_one_at_a_time = threading.RLock()
_copy = offload._copy


class Event:
    """A place in what a stream was asked for."""

    def __init__(self, *, blocking=False):
        self.place = None

    def synchronize(self):
        if self.place is not None:
            stream, number = self.place
            stream.do(number)


class Stream:
    """Does nothing before somebody waits for it."""

    def __init__(self, device=None):
        self.asked, self.done = [], 0

    def ask(self, work):
        self.asked.append(work)

    def do(self, number):
        with _one_at_a_time:
            while self.done < number:
                work, self.asked[self.done] = self.asked[self.done], None
                self.done += 1
                work()

    def synchronize(self):
        self.do(len(self.asked))

    def record_event(self, event):
        event.place = self, len(self.asked)
        return event

    def wait_event(self, event):
        self.ask(event.synchronize)

    def wait_stream(self, other):
        self.wait_event(other.record_event(Event()))


class Now(Stream):
    """The stream of all other work, which tests do themselves: what it waits for is done at once."""

    def wait_event(self, event):
        super().wait_event(event)
        self.synchronize()


class Streams:
    """Takes the place of `torch.cuda` in `staging`, where the CPU then counts as a device that makes copies itself.

    What `Beside` is given is asked of the stream that it makes current.

    Attributes:
        now: The stream of all other work.
        do: `Beside.do` as it is: what it is given is done at once.
        locked: Sizes of page-locked memory by address; `peak` is the most bytes there were.
        error: What `cudaHostRegister` answers.
    """

    def __init__(self, monkeypatch):
        self.now = self._current = Now()
        self.locked, self.peak, self.error = {}, 0, 0
        self.do = do = staging.Beside.do
        monkeypatch.setattr(staging, "cuda", self)
        monkeypatch.setattr(staging, "_reading", {})
        monkeypatch.setattr(staging, "_streams", {})
        monkeypatch.setattr(
            staging.Beside, "do", lambda beside, device, work: do(beside, device, lambda: self._current.ask(work))
        )
        monkeypatch.setattr(staging, "_page_locked", lambda size: torch.empty(size, dtype=torch.uint8))
        for module in (staging, snapshot):
            monkeypatch.setattr(module, "copies_itself", lambda device: True)

    Stream = Stream

    def Event(self, **options):  # noqa: N802 - CUDA's name
        return Event(**options)

    def current_stream(self, device):
        return self._current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def cudart(self):
        return self

    def cudaHostRegister(self, address, size, flags):  # noqa: N802
        assert flags == 1
        if not self.error:
            self.locked[address] = size
            self.peak = max(self.peak, sum(self.locked.values()))
        return self.error

    def cudaHostUnregister(self, address):  # noqa: N802
        del self.locked[address]
        return 0


def delay_offloading(put=setattr):
    """Have activations of any size offloaded, and copied as late as may be; `put` replaces attributes."""
    stream = Stream()

    def ask(*pair):
        sizes = {each.untyped_storage(): each.untyped_storage().nbytes() for each in tree_leaves(pair)}

        def work():
            assert all(each.nbytes() == size for each, size in sizes.items()), "freed before it was copied"
            _copy(*pair)

        stream.ask(work)
        return stream.record_event(Event())

    put(offload, "_LEAST_BYTES", 1)
    put(offload, "_copy", ask)
    put(offload, "_wait", lambda done, tensor: done.synchronize())
