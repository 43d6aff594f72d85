"""A module that is spread over processes as a folder of Hugging Face safetensors, gathered piece by piece."""

from __future__ import annotations

import json
import logging
import stat
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias

import torch
import torch.distributed as dist
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation, dot_natural_key, revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from cosmos_core.errors import CheckpointError
from cosmos_core.models.parallel.channel import Channel, open_channel
from cosmos_core.models.parallel.forwards import layout_of
from cosmos_core.models.parallel.lora import DOWN, below_adapters, is_adapter
from cosmos_core.models.parallel.stages import stages_of
from cosmos_core.weights.shards import (
    LocalShard,
    Merge,
    TensorShard,
    dtype_name,
    local_shards,
    shard_owners,
    torch_dtype,
)

_LOG: Final = logging.getLogger(__name__)

FILE_BYTES: Final = 2 << 30
"""Largest file, and what the leader holds at most besides one group of tensors."""

ADAPTER: Final = "adapter"
"""Subfolder for adapters: beside the model's own config, transformers would add them to it a second time."""

_PEFT: Final = "base_model.model."
"""Before the names of tensors in peft's files."""

Convert: TypeAlias = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
"""Makes tensors of a checkpoint of those of a model."""

Group: TypeAlias = tuple[tuple[str, ...], dict[str, torch.Tensor]]
"""Names of tensors that become tensors of the checkpoint together, and these, on meta."""


def channel_of(module: nn.Module) -> Channel:
    """A channel between the processes that a module, or a stage of one, is spread over; all of them call it."""
    layout = layout_of(module)
    return Channel() if layout is None or layout.mesh.world_size == 1 else open_channel()


def same_dtype(
    dtype: torch.dtype, tensors: Mapping[str, torch.Tensor], kept: Collection[str]
) -> dict[str, torch.dtype]:
    """One dtype for all floating-point tensors, but at least float32 for names in which one of `kept` occurs."""
    pattern = build_glob_alternation(list(kept))[0] if kept else None
    wide = torch.promote_types(dtype, torch.float32)
    return {
        name: wide if pattern is not None and pattern.search(name) else dtype
        for name, tensor in tensors.items()
        if tensor.is_floating_point()
    }


def export_parts(
    module: nn.Module,
    shell: PreTrainedModel,
    directory: Path,
    channel: Channel,
    *,
    dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
    file_bytes: int = FILE_BYTES,
) -> Sequence[torch.dtype]:
    """Write the weights and the config; every process of the mesh calls it, and the first one writes.

    Args:
        module: The weights, or this process's part of them.
        shell: The whole model, on meta: it knows the checkpoint's names.
        directory: The folder.
        channel: Between all processes.
        dtypes: Of the tensors of the model; one that is not named keeps its own.
        file_bytes: Largest file.

    Returns:
        The dtypes written, that of most values first.

    Raises:
        CheckpointError: The first process failed, with whatever; all of them say so.
    """
    tied = set(shell.all_tied_weights_keys) | set(shell._keys_to_ignore_on_save or ())  # noqa: SLF001 - as transformers
    below, merges = below_adapters(module, module.state_dict())
    written = write_gathered(
        {name: tensor for name, tensor in below.items() if name not in tied},
        directory,
        channel,
        merges=merges,
        dtypes=dtypes,
        convert=lambda held: revert_weight_conversion(shell, held),
        file_bytes=file_bytes,
    )
    found = floating_dtypes(written)
    led(channel, directory, lambda: _write_config(directory, shell, found[0]))
    return found


def floating_dtypes(tensors: Mapping[str, torch.Tensor]) -> Sequence[torch.dtype]:
    """The floating-point dtypes of tensors, that of most values first."""
    counts: Counter[torch.dtype] = Counter()
    for tensor in tensors.values():
        counts[tensor.dtype] += tensor.numel() if tensor.is_floating_point() else 0
    return [dtype for dtype, count in counts.most_common() if count]


def write_gathered(
    state: Mapping[str, torch.Tensor],
    directory: Path,
    channel: Channel,
    *,
    merges: Mapping[str, Merge] = MappingProxyType({}),
    stem: str = "model",
    dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
    convert: Convert = dict,
    file_bytes: int = FILE_BYTES,
) -> dict[str, torch.Tensor]:
    """Write tensors, if there are any, into files called after `stem` (see `export_parts`).

    In the files they have the names that `convert` gives them; what was written is returned, on meta.
    """
    shares = local_shards(state, merges)
    places = shard_owners(shares, channel.exchange)
    facts = {name: next(iter(shards)).facts for name, shards in places.items()}
    own = {name: torch_dtype(each.dtype) for name, each in facts.items()}
    outlines = {
        name: torch.empty(each.shape, dtype=dtypes.get(name, own[name]), device="meta") for name, each in facts.items()
    }
    groups = group_tensors(convert, outlines)
    written = {name: each for _, made in groups for name, each in made.items()}
    pieces = (
        {name: _gathered(places[name], shares.get(name), channel, outlines[name].dtype) for name in names}
        for names, _ in groups
    )

    def write() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        split = split_torch_state_dict_into_shards(
            written, filename_pattern=f"{stem}{{suffix}}.safetensors", max_shard_size=file_bytes
        )
        # Looked through here, not as they are gathered: while the first process fails, the others still send.
        held = (_within_range(piece, own) for piece in pieces)
        _write_files(directory, split, (made for piece in held for made in convert(piece).items()), stem)

    if places:
        led(channel, directory, write, pieces)
    return written


def _within_range(tensors: dict[str, torch.Tensor], own: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """Tensors, refused if a value became infinite when it was cast from their own dtype."""
    for name, tensor in tensors.items():
        if tensor.dtype != own[name] and bool(torch.isinf(tensor).any()):
            dtype, largest = dtype_name(tensor.dtype), torch.finfo(tensor.dtype).max
            raise CheckpointError(
                f"{name} has values beyond {largest:g}, the largest of {dtype}; export in another dtype, such as "
                f"{dtype_name(own[name])}"
            )
    return tensors


def led(channel: Channel, directory: Path, write: Callable[[], None], pieces: Iterable[object] = ()) -> None:
    """Let the first process write while the others send it what they hold; it succeeds on all or on none.

    Args:
        channel: Between all processes.
        directory: What is written, for the message.
        write: Called by the first process; it takes from `pieces`.
        pieces: Gathered one by one when they are taken, by all processes together.

    Raises:
        CheckpointError: The first process failed.
    """
    said, failure = channel.lead(write, _words, pieces)
    if said:
        raise CheckpointError(f"{directory} could not be written: {said}") from failure


def export_adapters(
    module: nn.Module, directory: Path, channel: Channel, *, below: str | None, dtype: torch.dtype | None = None
) -> None:
    """Write the adapters as peft does; every process of the mesh calls it, and nothing is written if there are none.

    They keep their own dtype if none is given: in that of the model, small changes of it would be lost.
    """
    state = {name: each for name, each in module.state_dict().items() if is_adapter(name)}
    written = write_gathered(
        state,
        directory,
        channel,
        stem="adapter_model",
        dtypes={} if dtype is None else same_dtype(dtype, state, ()),
        convert=lambda held: {f"{_PEFT}{name}": each for name, each in held.items()},
        file_bytes=sys.maxsize,
    )
    names = [name.removeprefix(_PEFT) for name in written]
    if names:
        led(channel, directory, lambda: _write_adapter_config(module, names, directory, below))


def share_files(directory: Path) -> None:
    """Give the weights of an export the mode of its config: safetensors makes files for their owner alone."""
    mode = stat.S_IMODE((directory / "config.json").stat().st_mode)
    for path in directory.rglob("*.safetensors"):
        path.chmod(mode)


def _write_adapter_config(module: nn.Module, names: Collection[str], directory: Path, below: str | None) -> None:
    # Before transformers fused experts, these were linear layers with the names of dense ones, and peft thinks so.
    taken = sorted({"gate_proj", "up_proj", "down_proj"} & {part for name in names for part in name.split(".")})
    if taken and any(parameter.dim() == 3 for parameter in module.parameters()):
        _LOG.warning(
            "%s: peft takes adapters of %s for those of the experts, which have none; the merged model is right",
            type(module).__name__, " and ".join(taken),
        )  # fmt: skip
    # Of the layout: this process may hold none of the adapters.
    layout = layout_of(stages_of(module)[0])
    lora = None if layout is None else layout.lora
    assert lora is not None, "a layout has added them"
    config = {
        "base_model_name_or_path": below,
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": [name.removesuffix(f".{DOWN}.weight") for name in names if name.endswith(f".{DOWN}.weight")],
        "task_type": "CAUSAL_LM",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _words(error: Exception) -> str:
    """The words of an error: our own and a file system's as they are, any other's with its class."""
    said = str(error).strip().partition("\n")[0]
    is_plain = said and isinstance(error, (OSError, SafetensorError, CheckpointError))
    return said if is_plain else f"{type(error).__name__}: {said}"


def group_tensors(convert: Convert, outlines: Mapping[str, torch.Tensor]) -> list[Group]:
    """The smallest groups that turn into a checkpoint's tensors without one another: single ones, else layers.

    `outlines` are the tensors, on meta.
    """
    expected = set(convert(dict(outlines)))
    keys: tuple[Callable[[str], object], ...] = (lambda name: name, _layer_of, lambda _: None)
    for key in keys:
        together: dict[object, list[str]] = {}
        for name in sorted(outlines, key=dot_natural_key):
            together.setdefault(key(name), []).append(name)
        groups = [(tuple(names), convert({name: outlines[name] for name in names})) for names in together.values()]
        found = [name for _, made in groups for name in made]
        if set(found) == expected and len(found) == len(expected):
            return groups
    raise AssertionError("all tensors together make the checkpoint")


def _layer_of(name: str) -> object:
    """A name up to its first number; all of the name where there is none."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdecimal()), len(parts))
    return tuple(parts[: number + 1])


def _gathered(
    owners: Mapping[TensorShard, int], share: LocalShard | None, channel: Channel, dtype: torch.dtype
) -> torch.Tensor:
    """The whole tensor on the leader; elsewhere an empty one."""
    whole = torch.empty(next(iter(owners)).shape if channel.is_leader else (), dtype=dtype)
    for shard, rank in owners.items():
        own = share.sent().to(dtype).to("cpu").contiguous() if share is not None and rank == channel.rank else None
        if channel.is_leader:
            part = own if own is not None else torch.empty(shard.size, dtype=dtype)
            if own is None:
                dist.recv(_bytes(part), group=channel.group, group_src=rank)
            index = tuple(slice(first, first + count) for first, count in zip(shard.start, shard.size, strict=True))
            whole[index] = part
        elif own is not None:
            dist.send(_bytes(own), group=channel.group, group_dst=0)
    return whole


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _write_files(
    directory: Path, split: StateDictSplit, tensors: Iterator[tuple[str, torch.Tensor]], stem: str
) -> None:
    """Write each file as soon as all of its tensors are there."""
    waiting: dict[str, torch.Tensor] = {}
    for file, names in split.filename_to_tensors.items():
        while not waiting.keys() >= set(names):
            name, tensor = next(tensors)
            # Parts of a fused tensor share its memory, which the format does not do.
            waiting[name] = tensor.clone(memory_format=torch.contiguous_format)
        save_file({name: waiting.pop(name) for name in names}, directory / file, metadata={"format": "pt"})
    for _ in tensors:
        raise AssertionError("every tensor has a file")
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _write_config(directory: Path, shell: PreTrainedModel, dtype: torch.dtype) -> None:
    config = shell.config
    config.architectures = [type(shell).__name__]
    config.dtype = dtype_name(dtype)
    for part in (getattr(config, name, None) for name in config.sub_configs):
        if part is not None and part.dtype is not None:
            part.dtype = config.dtype
    if shell._auto_class is not None:  # noqa: SLF001 - as transformers
        custom_object_save(shell, directory, config=config)
    config.save_pretrained(directory)
    if shell.can_generate():
        shell.generation_config.save_pretrained(directory)
