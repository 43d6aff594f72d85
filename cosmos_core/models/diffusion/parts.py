"""Parts of a checkpoint that are never trained: encoders of text and images, and the autoencoder.

Shape legend: C channels, T latent frames, H and W latent height and width, F frames, h and w height and width.
"""

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
            try:
                module = self._module.to(device)
            except torch.OutOfMemoryError as error:
                # What was moved already would stay there.
                self._module.to("cpu")
                name = type(self._module).__name__
                raise ConfigError(f"{device} has no room for {name}{self._instead}: {first_line(error)}") from error
            yield module, device


class Codec:
    """Turns pixels into latents and back; this one leaves them as they are.

    Attributes:
        channels: C.
        temporal: Frames of a latent frame, but for the first one, which is one frame.
        spatial: Pixels of a latent along each side.
    """

    channels: int = 3
    temporal: int = 1
    spatial: int = 1

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """float32 [C, T, H, W] of float32 [3, F, h, w] in [-1, 1]; nothing is drawn."""
        return pixels

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """float32 [3, F, h, w] of float32 [C, T, H, W]."""
        return latents


class Autoencoder(Codec):
    """A causal video autoencoder of diffusers.

    Its latents are normalised by the mean and the standard deviation that its config states, channel by channel.

    Args:
        config: Of the autoencoder: `z_dim`, `latents_mean`, `latents_std`, and its scale factors.
        part: Its module, in float32. What is elsewhere is taken to it, and what it becomes back.
    """

    def __init__(self, config: Any, part: Part) -> None:
        self.channels = int(config["z_dim"])
        stages = config["temperal_downsample"]
        self.temporal = int(config.get("scale_factor_temporal") or 2 ** sum(stages))
        self.spatial = int(config.get("scale_factor_spatial") or 2 ** len(stages))
        self._mean: Final = torch.tensor(config["latents_mean"]).view(-1, 1, 1, 1)
        self._std: Final = torch.tensor(config["latents_std"]).view(-1, 1, 1, 1)
        self._part: Final = part

    @torch.no_grad()
    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """The most likely latents."""
        with self._part.used() as (module, device):
            latents: torch.Tensor = module.encode(pixels[None].to(device)).latent_dist.mode()[0].float()
        return (latents.to(pixels.device) - self._mean.to(pixels.device)) / self._std.to(pixels.device)

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """The pixels that latents stand for."""
        raw = latents * self._std.to(latents.device) + self._mean.to(latents.device)
        with self._part.used() as (module, device):
            pixels: torch.Tensor = module.decode(raw[None].to(device), return_dict=False)[0][0].float()
        return pixels.to(latents.device)
