"""Parts of a checkpoint that are never trained: encoders of text and images, autoencoders."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from cosmos_core.errors import ConfigError
from cosmos_core.models.weights.loading import first_line


class Part:
    """A module that is loaded when it is first used, and taken to where it works.

    Threads may share it: one encodes rows while another renders.

    Args:
        load: Gives the module, in evaluation mode, that needs no gradients.
        device: Says where it works.
        instead: What to do where there is no room for it.
    """

    def __init__(
        self, load: Callable[[], torch.nn.Module], device: Callable[[], torch.device], instead: str = ""
    ) -> None:
        self._load: Final = load
        self._device: Final = device
        self._instead: Final = instead
        self._lock: Final = threading.Lock()
        self._module: torch.nn.Module | None = None

    @contextlib.contextmanager
    def used(self) -> Iterator[tuple[Any, torch.device]]:
        """The module and where it is, for one thread at a time: some keep what they know of earlier inputs.

        Raises:
            CheckpointError: It cannot be loaded.
            ConfigError: The device has no room for it.
        """
        with self._lock:
            if self._module is None:
                self._module = self._load()
            device = self._device()
            yield self._taken(self._module, device), device

    def _taken(self, module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
        try:
            return module.to(device)
        except torch.OutOfMemoryError as error:
            # What was moved already would stay there.
            module.to("cpu")
            name = type(module).__name__
            raise ConfigError(f"{device} has no room for {name}{self._instead}: {first_line(error)}") from error
