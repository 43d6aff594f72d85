"""A stand-in for CUDA's streams: what is asked for beside other work is done as late as may be."""

from __future__ import annotations

import contextlib

import torch

from cosmos_core.weights import snapshot, staging


class Streams:
    """Takes the place of `torch.cuda` in `staging`, where the CPU then counts as a device that makes copies itself.

    Work waits until somebody waits for it, or until the stream of all other work is to.

    Attributes:
        locked: Sizes of page-locked memory by address.
        error: What `cudaHostRegister` answers.
    """

    def __init__(self, monkeypatch):
        self.locked = {}
        self.error = 0
        self._begun = []
        monkeypatch.setattr(staging, "cuda", self)
        monkeypatch.setattr(staging, "_reading", {})
        monkeypatch.setattr(staging.Beside, "do", self._do())
        monkeypatch.setattr(staging, "_page_locked", lambda size: torch.empty(size, dtype=torch.uint8))
        for module in (staging, snapshot):
            monkeypatch.setattr(module, "copies_itself", lambda device: True)

    def _do(self):
        def do(beside, device, work):
            self._begun.append(work)
            beside._work, beside._done = work, self
            staging._reading[device] = self

        return do

    def synchronize(self):
        while self._begun:
            self._begun.pop(0)()

    def wait_event(self, event):
        event.synchronize()

    def current_stream(self, device):
        return self

    def stream(self, stream):
        return contextlib.nullcontext()

    class Event:
        def synchronize(self):
            pass

        def record(self):
            pass

    def cudart(self):
        return self

    def cudaHostRegister(self, address, size, flags):  # noqa: N802 - CUDA's name
        assert flags == 1
        if not self.error:
            self.locked[address] = size
        return self.error

    def cudaHostUnregister(self, address):  # noqa: N802
        del self.locked[address]
        return 0
