"""What a folder of safetensors files holds, read from their headers alone, and what is wrong with them.

Source: the format's description, https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import msgspec

from cosmos_core.errors import CheckpointError

_OTHER_FORMATS: Final = ("pytorch_model*.bin", "consolidated*.pth", "*.ckpt", "tf_model.h5", "flax_model.msgpack")
_LENGTH_BYTES: Final = 8
_MAX_HEADER_BYTES: Final = 100_000_000
"""The format's own limit."""


@attrs.frozen(kw_only=True)
class Stored:
    """A tensor in a file.

    Attributes:
        file: The file.
        shape: Its shape.
        dtype: The format's name of its dtype, such as `BF16`.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str


@attrs.frozen(kw_only=True)
class _Index:
    weight_map: dict[str, str]


def holds_weights(folder: Path, stem: str = "model") -> bool:
    """Whether a folder has safetensors files, or an index (called after `stem`) that promises some."""
    return any(folder.glob("*.safetensors")) or (folder / f"{stem}.safetensors.index.json").is_file()


def absence(folder: Path, stem: str = "model") -> str:
    """What is said of a folder without weights, of which a run can be planned.

    Raises:
        CheckpointError: It has weights, in another format.
    """
    others = sorted(path.name for pattern in _OTHER_FORMATS for path in folder.glob(pattern))
    if others:
        raise CheckpointError(
            f"model.path: {folder} has its weights in {others[0]}, which may hold code and is not read; convert them "
            "to safetensors: save_pretrained of transformers writes it"
        )
    return (
        f"model.path: {folder} holds a config but no weights ({stem}.safetensors or {stem}.safetensors.index.json); "
        "give a checkpoint (--set model.path=...)"
    )


def stored_tensors(folder: Path, stem: str = "model") -> dict[str, Stored]:
    """The tensors of a checkpoint by name.

    Args:
        folder: Of the checkpoint.
        stem: What its files are called after.

    Raises:
        CheckpointError: A file is missing or truncated, or does not hold what the index says; it is named.
    """
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if not index.is_file():
        if not single.is_file():
            raise CheckpointError(absence(folder, stem))
        return _read_header(single)
    places = _read_index(index)
    counts = Counter(places.values())
    for name, count in counts.items():
        if not (folder / name).is_file():
            raise CheckpointError(
                f"model.path: {folder / name} is missing; {index.name} says that it holds {count} of {len(places)} "
                "tensors"
            )
    found = {name: _read_header(folder / name) for name in counts}
    for name, file in places.items():
        if name not in found[file]:
            raise CheckpointError(
                f"model.path: {folder / file} lacks the tensor {name}, which {index.name} says it holds"
            )
    return {name: found[file][name] for name, file in places.items()}


def _read_index(path: Path) -> dict[str, str]:
    try:
        places = msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"model.path: {path} is damaged: {error}") from error
    strays = [file for file in places.values() if Path(file).name != file]
    if strays:
        raise CheckpointError(f"model.path: {path} names {strays[0]!r}, which is no file of its folder")
    return places


def _read_header(path: Path) -> dict[str, Stored]:
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
                raise CheckpointError(
                    f"model.path: {path} is truncated or no safetensors file: {size:,} bytes, "
                    f"and a header of {length:,} bytes is announced"
                )
            header: Mapping[str, Any] = json.loads(file.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        found = {
            name: Stored(file=path, shape=tuple(entry["shape"]), dtype=str(entry["dtype"]))
            for name, entry in entries.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"model.path: {path} is damaged: its header cannot be read ({error!r})") from error
    if size != _LENGTH_BYTES + length + end:
        raise CheckpointError(
            f"model.path: {path} is truncated: it has {size:,} bytes and should have {_LENGTH_BYTES + length + end:,}"
        )
    return found
