"""Weights from safetensors files straight into a process's shards, one tensor at a time, and the memory for them."""

from __future__ import annotations

import copy
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias

import attrs
import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    SkipParameters,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from cosmos_core.errors import CheckpointError, PluginIncompatibleError
from cosmos_core.models.weights.loading import (
    FLOATS,
    LIBRARY_ERRORS,
    Stored,
    absence,
    first_line,
    holds_weights,
    refuse_nonfinite,
    stored_tensors,
)
from cosmos_core.models.weights.quantised import Quantised, joined
from cosmos_core.weights.shards import LocalShard, local_shard


@attrs.frozen(kw_only=True, eq=False)
class Recipe:
    """A way to make some tensors of the model.

    Attributes:
        name: The first of them.
        sources: Names in the checkpoint, in order, each with the pattern of the converter that it matches.
        converter: Joins and splits; None where the one source is the tensor.
    """

    name: str
    sources: tuple[tuple[str, str], ...]
    converter: WeightConverter | None

    @property
    def num_merged(self) -> int:
        """The number of modules (experts) that are stacked first, hence can be made one by one; 0 if none are."""
        operation = self.converter.operations[0] if self.converter is not None else None
        if not isinstance(operation, MergeModulelist) or operation.dim != 0:
            return 0
        counts = set(Counter(pattern for _, pattern in self.sources).values())
        return counts.pop() if len(counts) == 1 else 0

    def only(self, first: int, last: int) -> Recipe:
        """The same of some of the merged modules."""
        kept: dict[str, list[str]] = {}
        for name, pattern in self.sources:
            kept.setdefault(pattern, []).append(name)
        sources = tuple((name, pattern) for pattern, names in kept.items() for name in names[first:last])
        return attrs.evolve(self, sources=sources)

    def make(self, module: PreTrainedModel, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of the model, by name, of what `read` gives of the checkpoint.

        Raises:
            CheckpointError: The sources do not fit together.
        """
        if self.converter is None:
            return {self.name: read(self.sources[0][0])}
        converter = copy.deepcopy(self.converter)
        for name, pattern in self.sources:
            converter.add_tensor(self.name, name, pattern, read(name))
        try:
            made: Mapping[str, Any] = converter.convert(self.name, model=module, config=module.config)
        except (*LIBRARY_ERRORS, SkipParameters) as error:
            raise CheckpointError(
                f"{self.name} cannot be made of {self.sources[0][0]} …: {first_line(error)}"
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def recipes(module: PreTrainedModel, names: Sequence[str]) -> list[Recipe]:
    """The ways to make a model's tensors of a checkpoint's names; what the model has no use for is left out."""
    mapping = get_model_conversion_mapping(module)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    wanted = module.state_dict()
    prefix = module.base_model_prefix
    sources: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = rename_source_key(name, [], [], prefix, wanted)
        if target in wanted:
            sources.setdefault(target, []).append((name, pattern or ""))
    return [
        Recipe(name=target, sources=tuple(listed), converter=by_pattern.get(listed[0][1]))
        for target, listed in sources.items()
    ]


_SCALED: Final = ("F8_", "F4", "F6_", "I8", "U8", "I32")
"""Dtypes of values that mean nothing without scales."""

_LAYER: Final = re.compile(r"(.*\blayers)\.(\d+)\..+")

_MAPPED_VALUES: Final = 1 << 22
"""Most that is read of a file before it is opened anew: what was read stays in memory as long as it is open."""

Weights: TypeAlias = Callable[[str, LocalShard], torch.Tensor]
"""Gives the part of a tensor of a whole model where a share lies, in any dtype; it is valid until the next call."""


def weights_of(module: nn.Module) -> Weights:
    """The weights of a module that one process has made."""
    tensors = module.state_dict()
    return lambda name, share: tensors[name][share.index]


class TensorFiles:
    """Tensors in safetensors files, read one after another."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self._stored: Final = stored
        self._open: tuple[Path, Any] | None = None
        self._num_mapped = 0

    def read(self, name: str, index: tuple[slice, ...] = ()) -> torch.Tensor:
        """A tensor, or a part of it; valid until the next call."""
        stored = self._stored[name]
        if isinstance(stored, Quantised):
            return stored.values(self._read, index or tuple(slice(0, size) for size in stored.shape))
        return self._read(stored, index)

    def _read(self, stored: Stored, index: tuple[slice, ...]) -> torch.Tensor:
        name = stored.name
        try:
            file = self._file(stored.file, _num_values(stored.shape, index))
            part: torch.Tensor = file.get_slice(name)[index] if stored.shape and index else file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{stored.file}: {name} cannot be read: {first_line(error)}") from error
        return part

    def _file(self, path: Path, num_values: int) -> Any:
        """The file, open: its header is read each time that it is opened, and a file may hold a thousand tensors."""
        self._num_mapped += num_values
        if self._open is None or self._open[0] != path or self._num_mapped > _MAPPED_VALUES:
            self._open = None
            self._open, self._num_mapped = (path, safe_open(path, framework="pt")), num_values
        return self._open[1]


class Streamed:
    """Weights of a checkpoint, looked through before anything is read; its files are called after `stem`.

    Raises:
        CheckpointError: Files are missing or truncated, or the checkpoint is not one of this model.
    """

    stem: ClassVar[str] = "model"

    def __init__(self, path: str, module: Any) -> None:
        self._module = module
        self._stored = joined(stored_tensors(folder_of(path), self.stem))
        self._recipes: dict[str, Recipe] = {}
        self._files: Final = TensorFiles(self._stored)
        wanted = module.state_dict()
        for recipe in self._recipes_of(module):
            for name, made in recipe.make(module, self._outline).items():
                if name in wanted:
                    self._check(name, tuple(made.shape), wanted[name], recipe)
                    self._recipes[name] = recipe
        self._follow_tied(module)
        if missing := [name for name in wanted if name not in self._recipes]:
            raise CheckpointError(
                f"model.path: {path!r} lacks {len(missing)} of the {len(wanted)} tensors of {type(module).__name__}, "
                f"the first is {missing[0]}; it holds {len(self._stored)}, such as {next(iter(self._stored), None)}"
            )
        self._refuse_strays(path, module)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype in which each floating-point tensor of the model is stored; the widest of what it is made of."""
        found = {}
        for name, tensor in self._module.state_dict().items():
            if tensor.is_floating_point():
                stored = (FLOATS[self._stored[source].dtype] for source, _ in self._recipes[name].sources)
                found[name] = functools.reduce(torch.promote_types, stored)
        return found

    def read(self, name: str, share: LocalShard) -> torch.Tensor:
        """Give a part, as `Weights` do."""
        recipe = self._recipes[name]
        if recipe.converter is None:
            return self._files.read(recipe.sources[0][0], share.index)
        if recipe.num_merged != share.shape[0]:
            return recipe.make(self._module, self._files.read)[name][share.index]
        rows, *others = share.index
        some = recipe.only(rows.start, rows.stop).make(self._module, self._files.read)
        return some[name][(slice(None), *others)]

    def _recipes_of(self, module: PreTrainedModel) -> list[Recipe]:
        return recipes(module, list(self._stored))

    def _outline(self, name: str) -> torch.Tensor:
        stored = self._stored[name]
        if stored.dtype.startswith(_SCALED):
            raise CheckpointError(
                f"{stored.file}: {name} is quantised ({stored.dtype}); convert the checkpoint to bfloat16 to train it"
            )
        return torch.empty(stored.shape, device="meta")

    def _check(self, name: str, found: tuple[int, ...], tensor: torch.Tensor, recipe: Recipe) -> None:
        wanted = tuple(tensor.shape)
        for source, _ in recipe.sources if tensor.is_floating_point() else ():
            self._stored[source].check_float()
        if found != wanted:
            source = recipe.sources[0][0]
            raise CheckpointError(
                f"{self._stored[source].file}: {name} (from {source}) has shape {found}, "
                f"and {type(self._module).__name__} needs {wanted}; is the config of another model?"
            )

    def _follow_tied(self, module: PreTrainedModel) -> None:
        """Tied tensors may be stored under either name."""
        tied: Mapping[str, str] = getattr(module, "all_tied_weights_keys", {})
        for name, listed in tied.items():
            if listed not in self._recipes and name in self._recipes:
                self._recipes[listed] = self._recipes[name]
        for name, listed in tied.items():
            if listed in self._recipes:
                self._recipes[name] = self._recipes[listed]

    def _refuse_strays(self, path: str, module: PreTrainedModel) -> None:
        """A checkpoint of more layers than the model has is another's; layers that predict further tokens are known."""
        used = {source for recipe in self._recipes.values() for source, _ in recipe.sources}
        depths: dict[str, int] = {}
        for found in filter(None, map(_LAYER.fullmatch, used)):
            depths[found[1]] = max(depths.get(found[1], 0), int(found[2]) + 1)
        further = getattr(module.config.get_text_config(), "num_nextn_predict_layers", None) or 0
        ignored = module._keys_to_ignore_on_load_unexpected or ()  # noqa: SLF001 - as transformers does
        for name in self._stored:
            match = _LAYER.fullmatch(name)
            if match is None or any(re.search(pattern, name) for pattern in ignored):
                continue
            depth = depths.get(match[1])
            if depth is not None and int(match[2]) >= depth + further:
                raise CheckpointError(
                    f"model.path: {path!r} holds {name}, and {type(module).__name__} has {depth} {match[1]}; is the "
                    "config of another model?"
                )


def _num_values(shape: tuple[int, ...], index: tuple[slice, ...]) -> int:
    sizes = [len(range(size)[part]) for size, part in zip(shape, index, strict=True)] if index else shape
    return math.prod(sizes)


def absent_weights(path: str | None, module: Any, kind: type[Streamed] = Streamed) -> str:
    """Look through a checkpoint on this machine; of a folder with a config alone, what is missing; else empty.

    Raises:
        CheckpointError: Files are missing or truncated, or the checkpoint is not one of this model.
    """
    folder = None if path is None else Path(path)
    if folder is None or not folder.is_dir():
        return ""
    if not holds_weights(folder, kind.stem):
        return absence(folder, kind.stem)
    kind(str(folder), module)
    return ""


def folder_of(path: str, patterns: Sequence[str] = (), revision: str | None = None) -> Path:
    """The folder of a checkpoint; of one on the hub with these files, else weights and JSON at its top, are fetched."""
    if Path(path).is_dir():
        return Path(path)
    try:
        # Below the top some have the same weights once more, in a format of their makers'.
        wanted, ignored = (list(patterns), None) if patterns else (["*.safetensors", "*.json"], ["*/*"])
        return Path(snapshot_download(path, revision=revision, allow_patterns=wanted, ignore_patterns=ignored))
    except LIBRARY_ERRORS as error:
        where = "" if revision is None else f" at revision {revision!r}"
        raise CheckpointError(f"model.path: cannot fetch {path!r}{where}: {first_line(error)}") from error


def materialise(
    stages: Sequence[nn.Module],
    *,
    device: torch.device,
    offload: bool = False,
    compute_buffers: Callable[[Any, torch.device], None] | None = None,
) -> None:
    """Allocate what the stages hold, and compute what no checkpoint has of it, by default as transformers does."""
    for stage in stages:
        shared = _occurrences(stage)
        place = torch.device("cpu") if offload else device
        stage._apply(  # type: ignore[no-untyped-call]  # noqa: SLF001 - `to_empty` loses values
            lambda each, to=place: torch.empty_like(each, device=to) if each.is_meta else each.to(to)
        )
        for (owner, last), *others in shared:
            for other, name in others:
                setattr(other, name, getattr(owner, last))
        (compute_buffers or _compute_buffers)(stage, device)


@torch.no_grad()
def fill(stages: Sequence[nn.Module], weights: Weights, path: str | None) -> None:
    """Give every tensor that the stages hold its values; `path` is of the checkpoint that they are read from."""
    for stage in stages:
        filled: set[int] = set()
        parameters = {id(parameter) for parameter in stage.parameters()}
        for name, tensor in stage.state_dict(keep_vars=True).items():
            if id(tensor) in filled:
                continue
            filled.add(id(tensor))
            share = local_shard(tensor)
            if share.tensor.numel():
                share.tensor.copy_(weights(name, share))
                if path is not None and id(tensor) in parameters:
                    refuse_nonfinite(name, share.tensor, path)


def _occurrences(stage: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The places of each parameter that is used more than once, in order."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in stage.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((module, name))
    return [listed for listed in places.values() if len(listed) > 1]


def _compute_buffers(stage: PreTrainedModel, device: torch.device) -> None:
    """Set buffers that no checkpoint has by the model's own initialisation, as transformers does when it loads one."""
    # Of models within models the innermost, which comes last.
    models = [each for each in stage.modules() if isinstance(each, PreTrainedModel)]
    owners = {child: model for model in models for child in model.modules()}
    for path, module in stage.named_modules():
        held = module._non_persistent_buffers_set  # noqa: SLF001
        # Under each of its names, also where two have one buffer.
        buffers = dict(module.named_buffers(recurse=False, remove_duplicate=False))
        names = [name for name in buffers if name in held]
        for name, buffer in buffers.items():
            setattr(module, name, buffer.to(device))
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            # What transformers' functions leave alone.
            tensor._is_hf_initialized = True  # noqa: SLF001
        for name in names:
            buffer = getattr(module, name)
            buffer._is_hf_initialized = False  # noqa: SLF001
            if buffer.is_floating_point():
                buffer.fill_(torch.nan)
        if names:
            with torch.no_grad():
                owners[module]._init_weights(module)  # noqa: SLF001 - the only way to these values
        for name in names:
            if bool(getattr(module, name).isnan().any()):
                where = ".".join(filter(None, (path, name)))
                raise PluginIncompatibleError(
                    f"{type(stage).__name__}: the buffer {where} is in no checkpoint and {type(module).__name__} is "
                    "not initialised by transformers, so its value is not known"
                )
