"""A transformer as a folder of diffusers, gathered piece by piece, with the other parts of its checkpoint beside it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import nn

from cosmos_core.models.adapters.beside import published_state
from cosmos_core.models.diffusion.checkpoint import CONFIG, INDEX, STEM, TRANSFORMER
from cosmos_core.models.parallel.channel import Channel, open_channel
from cosmos_core.models.parallel.rooted import layout_of
from cosmos_core.models.weights.exporting import (
    ADAPTER,
    export_adapters,
    led,
    share_files,
    write_gathered,
)

_WEIGHTS: Final = ".safetensors"


def export_transformer(module: nn.Module, config: Mapping[str, Any], directory: Path, source: Path | None) -> None:
    """Write it; every process that holds a part of the module calls it, and the first one writes.

    Args:
        module: This process's part.
        config: Of the transformer, with the name of its class.
        directory: Where to.
        source: The checkpoint whose other parts belong to it; None where there is none.

    Raises:
        CheckpointError: The first process failed, with whatever; all of them say so.
    """
    layout = layout_of(module)
    channel = Channel() if layout is None or layout.mesh.world_size == 1 else open_channel()
    folder = directory / TRANSFORMER
    write_gathered(published_state(module), folder, channel, stem=STEM)
    export_adapters(module, folder / ADAPTER, channel, below=None if source is None else str(source))
    led(channel, directory, lambda: _accompany(config, directory, source))


def _accompany(config: Mapping[str, Any], directory: Path, source: Path | None) -> None:
    folder = directory / TRANSFORMER
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    share_files(folder)
    for path in () if source is None else sorted(source.iterdir()):
        if path.name == TRANSFORMER or path.name.startswith("."):
            continue
        if path.is_dir():
            shutil.copytree(path, directory / path.name, copy_function=_placed, dirs_exist_ok=True)
        else:
            _placed(str(path), str(directory / path.name))
    index = directory / INDEX
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
    if Path(source).suffix == _WEIGHTS:
        try:
            os.link(real, target)
        except OSError:
            pass
        else:
            return
    shutil.copy2(real, target)
