"""Parts of a checkpoint that are never trained: encoders of text and images, autoencoders."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch


class Part:
    """A module that is loaded when it is first used, and taken to where it works.

    Threads may share it: one encodes rows while another renders.

    Args:
        load: Gives the module, in evaluation mode, that needs no gradients.
        device: Says where it works.
    """

    def __init__(self, load: Callable[[], torch.nn.Module], device: Callable[[], torch.device]) -> None:
        self._load: Final = load
        self._device: Final = device
        self._lock: Final = threading.Lock()
        self._module: torch.nn.Module | None = None

    @contextlib.contextmanager
    def used(self) -> Iterator[tuple[Any, torch.device]]:
        """The module and where it is, for one thread at a time: some keep what they know of earlier inputs.

        Raises:
            CheckpointError: It cannot be loaded.
        """
        with self._lock:
            if self._module is None:
                self._module = self._load()
            device = self._device()
            yield self._module.to(device), device

    def leave(self) -> None:
        """Wait in the machine's memory until it is used again."""
        with self._lock:
            if self._module is not None:
                self._module = self._module.to("cpu")
