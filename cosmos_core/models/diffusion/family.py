"""Families of world models: the classes that one is made of, the parts that are never trained, what is generated.

Shape legend: B latents of a batch, C channels, T latent frames, H and W latent height and width, L tokens of the text,
E their width, F frames, h and w height and width.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import nn

from cosmos_core.errors import ConfigError, DataError, PluginIncompatibleError
from cosmos_core.models.diffusion import checkpoint
from cosmos_core.models.diffusion.context import TokenSlices
from cosmos_core.models.diffusion.options import DiffusionOptions
from cosmos_core.models.weights.loading import first_line
from cosmos_core.protocols import ModelContext


class Part:
    """A part of a checkpoint that is never trained: loaded when it is first used, and taken to where it works.

    Threads may share it: one encodes rows while another renders. `instead` is what to do where there is no room for it.
    """

    def __init__(self, load: Callable[[], nn.Module], device: Callable[[], torch.device], instead: str = "") -> None:
        self._load, self._device, self._instead = load, device, instead
        self._lock: Final = threading.Lock()
        self._module: nn.Module | None = None

    @contextlib.contextmanager
    def used(self, place: torch.device | None = None) -> Iterator[tuple[Any, torch.device]]:
        """The module and where it is, for one thread at a time: some keep what they know of earlier inputs.

        It is where it works, or at `place`.

        Raises:
            CheckpointError: It cannot be loaded.
            ConfigError: The device has no room for it.
        """
        with self._lock:
            if self._module is None:
                self._module = self._load()
            device = self._device() if place is None else place
            try:
                module = self._module.to(device)
            except torch.OutOfMemoryError as error:
                # What was moved already would stay there.
                self._module.to("cpu")
                name = type(self._module).__name__
                raise ConfigError(f"{device} has no room for {name}{self._instead}: {first_line(error)}") from error
            yield module, device

    def leave(self) -> None:
        """Go to the machine's memory until it is used again."""
        with self._lock:
            if self._module is not None:
                self._module.to("cpu")


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
    """A causal video autoencoder of diffusers, in float32.

    Its latents are normalised by the mean and the standard deviation that its config states, channel by channel. Pixels
    that are elsewhere are taken to it, and latents back; these are decoded where they are.
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
        with self._part.used(latents.device) as (module, _):
            pixels: torch.Tensor = module.decode(raw[None], return_dict=False)[0][0].float()
        return pixels


_SIZES: Final = ("num_frames", "height", "width")


class Family(ABC):
    """A family says how its transformer is called, how guidance combines velocities, and which classes it is made of.

    Attributes:
        transformer_class: Name of the transformer's class in diffusers.
        autoencoder_class: Likewise of the autoencoder's.
        layers: Name of the list of blocks in the transformer.
        published: Revisions of repositories of the hub whose main branch has no checkpoint of diffusers, by name.
        device: Where rows are encoded: where the newest module was built, the CPU before any is.
    """

    transformer_class: ClassVar[str]
    autoencoder_class: ClassVar[str]
    layers: ClassVar[str]
    published: ClassVar[Mapping[str, str]] = {}

    def __init__(self, options: DiffusionOptions, context: ModelContext) -> None:
        self.options = options
        self.context = context
        self.device = torch.device("cpu")
        self._awake_on: torch.device | None = None
        self._parts: Final[list[Part]] = []
        self._here: Final = threading.local()

    @property
    def transformer(self) -> type[nn.Module]:
        """The class of the transformer."""
        return _class_named(self.transformer_class)

    @property
    @abstractmethod
    def neutral_guidance(self) -> float:
        """The guidance at which the velocity is that of the prompt alone."""

    @property
    def default_negative_prompt(self) -> str:
        """The text that guidance leads away from where the recipe names none, as in the family's own pipeline."""
        return ""

    @property
    @abstractmethod
    def text_width(self) -> int:
        """E."""

    @abstractmethod
    def denoise(
        self,
        module: nn.Module,
        latents_B: torch.Tensor,
        times_B: torch.Tensor,
        text_BLE: torch.Tensor,
        conditions: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """One forward of the transformer.

        Args:
            module: The weights.
            latents_B: float32 [B, C, T, H, W]; frames that are given are so already.
            times_B: float32 [B], 1 is noise.
            text_BLE: float32 [B, L, E].
            conditions: What `conditioning` gives besides the text, [B, ...] each.

        Returns:
            The velocity [B, C, T, H, W] in any dtype.
        """

    @abstractmethod
    def guide(self, velocity_B: torch.Tensor, negative_B: torch.Tensor, guidance: torch.Tensor) -> torch.Tensor:
        """The guided velocity, from those of the prompt and of the negative prompt, float32 [B, C, T, H, W].

        `guidance` is float32 [B, 1, 1, 1, 1].
        """

    def encode_words(self, words: str) -> torch.Tensor:  # noqa: ARG002 - for families that can
        """The embedding [L, E] of a caption by the checkpoint's own text encoder, float32, at most `text_length` long.

        Raises:
            DataError: The checkpoint has none.
        """
        raise DataError(
            "the model has no text encoder; give model.options.text = 'table', a row's metadata.text_embedding or a "
            "checkpoint that has one (model.path)"
        )

    def computed(self, config: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:  # noqa: ARG002 - most have none
        """Buffers of the transformer that no checkpoint has, by name, on the CPU."""
        return {}

    def spread(self, module: nn.Module, slices: TokenSlices) -> None:  # noqa: ARG002 - for families that can
        """Change forwards, so that tokens are spread over `cp`.

        Raises:
            PluginIncompatibleError: The family does not say how.
        """
        raise PluginIncompatibleError(f"{type(self).__name__} has no `spread` for its tokens: set policy.mesh.cp = 1")

    def most_patches(self, config: Mapping[str, Any]) -> tuple[int, int, int]:  # noqa: ARG002 - for families with places
        """Most patches of frames, rows and columns that the transformer has places for."""
        return sys.maxsize, sys.maxsize, sys.maxsize

    def check(self, config: Mapping[str, Any]) -> None:  # noqa: B027 - most families take every config
        """Refuse configs of the transformer's class that the family has no use for.

        Raises:
            ConfigError: It is such a one.
        """

    def make(self, config: Mapping[str, Any]) -> nn.Module:
        """The transformer, on the device of the context."""
        return self.transformer(**config)

    @functools.cached_property
    def config(self) -> Mapping[str, Any]:
        """Arguments of the transformer's class."""
        if self.context.config is not None:
            raw, key = self.context.config, "model.config"
        else:
            self._check_folder()
            raw, key = checkpoint.read_config(self.folder / checkpoint.TRANSFORMER), "model.path"
        config = checkpoint.complete_config(raw, self.transformer, key=key)
        self.check(config)
        return config

    @functools.cached_property
    def folder(self) -> Path:
        """The checkpoint's folder, with configs and tokenizers; weights on the hub may not be there yet."""
        if self.context.path is None:
            raise ConfigError("model.path: the recipe names no checkpoint, so there are none of its other parts")
        return checkpoint.folder_of(self.context.path, self._revision)

    @property
    def _revision(self) -> str | None:
        """The revision of a checkpoint on the hub: that of the options, or where the repository has it."""
        return self.options.revision or self.published.get(self.context.path or "")

    def _check_folder(self) -> None:
        """Refuse a revision of the hub that has no transformer, such as one with weights in another format."""
        path = self.context.path
        if path is not None and not Path(path).is_dir() and not (self.folder / checkpoint.TRANSFORMER).is_dir():
            where = f"revision {self._revision!r}" if self._revision else "the main branch"
            raise ConfigError(
                f"model.path: {where} of {path!r} on the hub has no {checkpoint.TRANSFORMER}/, as checkpoints of "
                "diffusers have; set model.options.revision to a branch or tag that has one"
            )

    def has(self, name: str) -> bool:
        """Tell whether the recipe names a checkpoint that has this part."""
        return self.context.path is not None and (self.folder / name).is_dir()

    def component(self, name: str | None) -> Path:
        """Folder of a part of the checkpoint with its weights; of all parts for None."""
        assert self.context.path is not None
        return checkpoint.fetched(self.context.path, self._revision, name)

    def encoder(self, name: str, made: Any) -> Part:
        """An encoder of the checkpoint, where `model.options.encoders` says."""
        chosen = self.options.encoder_precision
        precision = {} if chosen is None else {"dtype": torch.bfloat16 if chosen == "bf16" else torch.float32}
        part = Part(
            lambda: checkpoint.load_frozen(made, self.component(name), **precision),
            lambda: (
                torch.device("cpu")
                if getattr(self._here, "is_on_cpu", False) or self.options.encoders == "cpu"
                else self.device
            ),
            "; set model.options.encoders = 'cpu', or encoder_precision = 'bf16'",
        )
        self._parts.append(part)
        return part

    def sleep(self) -> None:
        """Take encoders and the autoencoder off the device; until `wake`, rows are encoded on the CPU."""
        self._awake_on, self.device = self._awake_on or self.device, torch.device("cpu")
        for part in self._parts:
            part.leave()

    def wake(self) -> None:
        """Let each of them return when it is used."""
        self.device, self._awake_on = self._awake_on or self.device, None

    @contextlib.contextmanager
    def on_cpu(self) -> Iterator[None]:
        """Let encoders work on the CPU, for this thread.

        A policy that learns from rollouts encodes a negative prompt and nothing else, and needs no encoder on its
        device.
        """
        self._here.is_on_cpu = True
        try:
            yield
        finally:
            self._here.is_on_cpu = False

    @functools.cached_property
    def codec(self) -> Codec:
        """Between pixels and latents: the checkpoint's autoencoder, else latents are pixels."""
        name = checkpoint.AUTOENCODER
        if not self.has(name):
            return Codec()

        def load() -> Any:
            # Loading through meta tensors would need accelerate, and is for larger ones.
            how = {"torch_dtype": torch.float32, "low_cpu_mem_usage": False}
            return checkpoint.load_frozen(_class_named(self.autoencoder_class), self.component(name), **how)

        instead = "; train on more processes (policy.mesh.dp_shard), or with device = 'cpu'"
        self._parts.append(part := Part(load, lambda: self.device, instead))
        return Autoencoder(checkpoint.read_config(self.folder / name), part)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(C, T, H, W) of what is generated.

        Raises:
            ConfigError: The size is none that the autoencoder and the transformer can make.
        """
        codec, options = self.codec, self.options
        patch, generated = self.config["patch_size"], self.config["out_channels"] or self.config["in_channels"]
        if generated != codec.channels:
            whose = "its autoencoder has" if isinstance(codec, Autoencoder) else "pixels have"
            raise ConfigError(f"model: the transformer generates {generated} channels, and {whose} {codec.channels}")
        frames = (options.num_frames - 1) // codec.temporal + 1
        if (options.num_frames - 1) % codec.temporal or frames % patch[0]:
            raise ConfigError(
                f"model.options.num_frames: {options.num_frames} is not 1 + a multiple of {codec.temporal}, or its "
                f"{frames} latent frames are no multiple of {patch[0]}"
            )
        for name, size, part in (("height", options.height, patch[1]), ("width", options.width, patch[2])):
            if size % (codec.spatial * part):
                raise ConfigError(
                    f"model.options.{name}: {size} is no multiple of {codec.spatial * part}, the pixels of a patch"
                )
        sizes = frames, options.height // codec.spatial, options.width // codec.spatial
        numbers = [size // int(part) for size, part in zip(sizes, patch, strict=True)]
        for name, number, most in zip(_SIZES, numbers, self.most_patches(self.config), strict=True):
            if number > most:
                raise ConfigError(
                    f"model.options.{name}: {getattr(options, name)} makes {number} patches, and the transformer has "
                    f"places for {most} of them; lower it, or take a model that has more"
                )
        return codec.channels, *sizes

    @property
    def num_tokens(self) -> int:
        """Tokens of what is generated."""
        (_, *sizes), patch = self.shape, self.config["patch_size"]
        return math.prod(size // int(part) for size, part in zip(sizes, patch, strict=True))


def _class_named(name: str) -> type[nn.Module]:
    # It takes seconds, and transformers come first.
    diffusers = importlib.import_module("diffusers")
    found: type[nn.Module] | None = getattr(diffusers, name, None)
    if found is None:
        raise ConfigError(
            f"model: diffusers {diffusers.__version__} has no {name}; install the release the plugin names"
        )
    return found
