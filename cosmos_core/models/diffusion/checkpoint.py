"""Checkpoints of diffusers: a folder with one subfolder for each component, and `model_index.json`."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from cosmos_core.config.problems import suggestion
from cosmos_core.errors import CheckpointError, ConfigError
from cosmos_core.models.parallel.lora import below_adapters
from cosmos_core.models.weights import streaming
from cosmos_core.models.weights.exporting import (
    ADAPTER,
    channel_of,
    export_adapters,
    floating_dtypes,
    led,
    same_dtype,
    share_files,
    write_gathered,
)
from cosmos_core.models.weights.loading import LIBRARY_ERRORS, first_line, require_folder

TRANSFORMER: Final = "transformer"
AUTOENCODER: Final = "vae"
STEM: Final = "diffusion_pytorch_model"
"""How files of weights are called."""
_INDEX: Final = "model_index.json"
_CONFIG: Final = "config.json"
_DESCRIPTIONS: Final = ("*.json", "*.txt", "*.model", "*.jinja")
"""Patterns of configs and tokenizers."""
_OWN_KEYS: Final = ("_class_name", "_diffusers_version", "_name_or_path")


def folder_of(path: str, revision: str | None) -> Path:
    """The folder of a checkpoint; of one on the hub what describes it is fetched, and no weights."""
    require_folder(path)
    return streaming.folder_of(path, _DESCRIPTIONS, revision)


def fetched(path: str, revision: str | None, part: str | None) -> Path:
    """The folder of a part of a checkpoint, weights included; of all of it for None."""
    folder_of(path, revision)
    wanted = [*_DESCRIPTIONS, "*.safetensors"]
    wanted = wanted if part is None else [f"{part}/{each}" for each in wanted]
    return streaming.folder_of(path, wanted, revision) / (part or "")


def load_frozen(made: Any, folder: Path, **how: Any) -> Any:
    """A part that is never trained, in evaluation mode, from safetensors alone: pickles run what they name.

    Raises:
        CheckpointError: There are no such weights, or they cannot be used.
    """
    try:
        module = made.from_pretrained(folder, use_safetensors=True, **how)
    except LIBRARY_ERRORS as error:
        raise CheckpointError(
            f"model.path: no usable safetensors of {made.__name__} at {folder}: {first_line(error)}"
        ) from error
    return module.requires_grad_(requires_grad=False).eval()


def read_config(folder: Path) -> Mapping[str, Any]:
    """The config of a component."""
    path = folder / _CONFIG
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: no usable config at {path}: {first_line(error)}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"model.path: {path} holds no JSON object")
    return found


def complete_config(config: Mapping[str, Any], made: type, *, key: str) -> dict[str, Any]:
    """The arguments with which a class of diffusers is made, of a config that errors call `key`, and its defaults.

    Raises:
        ConfigError: It is of another class, or has an unknown key.
    """
    stated = config.get("_class_name", made.__name__)
    if stated != made.__name__:
        raise ConfigError(f"{key}: of a {stated}, and this plugin is for {made.__name__}")
    parameters = inspect.signature(made.__init__).parameters  # type: ignore[misc]
    known = {name: each.default for name, each in parameters.items() if name != "self"}
    given = {name: value for name, value in config.items() if name not in _OWN_KEYS}
    for name in given:
        if name not in known:
            raise ConfigError(f"{key}.{name}: {made.__name__} has no such option; {suggestion(name, known)}")
    return known | given


class StreamedTransformer(streaming.Streamed):
    """Weights of a transformer in a checkpoint, which has the module's own names (see `streaming.Streamed`)."""

    stem = STEM

    def _recipes_of(self, module: Any) -> list[streaming.Recipe]:  # noqa: ARG002
        return [streaming.Recipe(name=name, sources=((name, ""),), converter=None) for name in self._stored]

    def _refuse_strays(self, path: str, module: Any) -> None:
        ignored = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
        strays = [name for name in self._stored if name not in self._recipes]
        strays = [name for name in strays if not any(part in name for part in ignored)]
        if strays:
            raise CheckpointError(
                f"model.path: {path} holds {strays[0]}, which {type(module).__name__} has no use for; is its config "
                "of another model?"
            )


def export_transformer(
    module: nn.Module,
    shell: nn.Module,
    config: Mapping[str, Any],
    directory: Path,
    source: Path | None,
    *,
    dtype: torch.dtype | None,
) -> Sequence[torch.dtype]:
    """Write a transformer and its config, which names its class, into a folder of their own (see `Model.export`).

    Every process that holds a part of the module calls it, and the first one writes. The other parts come from the
    checkpoint at `source`, if there is one. A CheckpointError says that the first process failed, with whatever; all of
    them say so. The shell is the whole transformer, on meta.
    """
    channel = channel_of(module)
    folder = directory / TRANSFORMER
    state, merges = below_adapters(module, module.state_dict())
    dtypes: Mapping[str, torch.dtype] = {}
    if dtype is not None:
        dtypes = same_dtype(dtype, shell.state_dict(), getattr(shell, "_keep_in_fp32_modules", None) or ())
    elif source is not None:
        dtypes = StreamedTransformer(str(source / TRANSFORMER), shell).dtypes
    written = write_gathered(state, folder, channel, merges=merges, stem=STEM, dtypes=dtypes)
    export_adapters(module, folder / ADAPTER, channel, below=None if source is None else str(source), dtype=dtype)
    led(channel, directory, lambda: _accompany(config, directory, source))
    return floating_dtypes(written)


def _accompany(config: Mapping[str, Any], directory: Path, source: Path | None) -> None:
    folder = directory / TRANSFORMER
    (folder / _CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    share_files(folder)
    for path in () if source is None else sorted(source.iterdir()):
        if path.name == TRANSFORMER or path.name.startswith("."):
            continue
        if path.is_dir():
            shutil.copytree(path, directory / path.name, copy_function=_placed, dirs_exist_ok=True)
        else:
            _placed(str(path), str(directory / path.name))
    index = directory / _INDEX
    if not index.exists():
        # What there is: a folder without it is no model of diffusers, and none to our own commands.
        parts = {TRANSFORMER: ["diffusers", config["_class_name"]]}
        versions = {"_diffusers_version": config["_diffusers_version"]}
        index.write_text(json.dumps({"_class_name": "DiffusionPipeline", **versions, **parts}, indent=2) + "\n")


def _placed(source: str, target: str) -> None:
    """Copy a file; weights, which nobody changes in place, are linked where the file system can."""
    Path(target).unlink(missing_ok=True)
    real = Path(source).resolve()
    # In the caches of hubs the name is a link's, and that of the file is its hash.
    if Path(source).suffix == ".safetensors":
        with contextlib.suppress(OSError):
            os.link(real, target)
            return
    shutil.copy2(real, target)
