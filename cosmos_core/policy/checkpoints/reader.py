"""Reads checkpoints as data, and verifies what it reads.

torch describes a checkpoint (`.metadata`) in a pickle. A pickle may call whatever it names, set attributes of it, and
declare parts of the checkpoint to be pickles, too. Here it is given stand-ins, which only keep what is said of them;
the description is then made of that, type by type. A checkpoint from a stranger can be wrong, but cannot run anything.

Each part of a tensor that was saved has a checksum there, and the description has one in `complete.json`. A part is
read as a whole, whatever the layout needs of it, and once, into memory that all parts of a thread share.
"""

from __future__ import annotations

import io
import logging
import pickle
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import attrs
import msgspec
import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

from cosmos_core.errors import CheckpointError, DamagedCheckpointError
from cosmos_core.policy.checkpoints.checkpoint import METADATA, Contents, read_place, require_whole
from cosmos_core.policy.checkpoints.frozen_digest import check_below
from cosmos_core.policy.checkpoints.saver import RNG, THREADS, WRITE_ERRORS, checksum, chunk_of, reason_of
from cosmos_core.policy.training.gradients import stored
from cosmos_core.policy.training.trainer import Trainer
from cosmos_core.storage import failures, is_out_of_reach, storage_options
from cosmos_core.weights.shards import LocalShard, local_shard, local_shards

_LOG: Final = logging.getLogger(__name__)

READ_ERRORS: Final = (*WRITE_ERRORS, pickle.UnpicklingError)
"""Errors of file systems, torch's reader and this one."""

_DAMAGE: Final = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
    msgspec.ValidationError,
)
"""Errors that reading a damaged pickle ends in."""


class UnlikeError(ValueError):
    """The checkpoint is of another model."""


class DamageError(ValueError):
    """Some of the checkpoint is not what was written."""


class SharesToLoad(DefaultLoadPlanner):
    """Plans to read shares of tensors, in place.

    Args:
        shares: What this process holds, by name.
    """

    def __init__(self, shares: Mapping[str, LocalShard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shares = shares

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take note of what was saved."""
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """The parts of saved boxes that make up each share.

        Raises:
            UnlikeError: A tensor was not saved, or with another shape.
        """
        assert self.metadata is not None
        items = []
        for name, share in self._shares.items():
            entry = self.metadata.state_dict_metadata.get(name)
            if not isinstance(entry, TensorStorageMetadata):
                raise UnlikeError(f"it lacks {name}")
            if tuple(entry.size) != share.shape:
                raise UnlikeError(f"{name} has shape {tuple(entry.size)} there and {share.shape} here")
            if share.tensor.numel():
                items += create_read_items_for_chunk_list(name, entry, [chunk_of(share)])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The tensor that an item is read into."""
        return self._shares[index.fqn].tensor


class CheckpointReader(FsspecReader):
    """Reads the tensors of a checkpoint.

    Args:
        path: Path or fsspec URL.
        contents: The checkpoint's files, as `complete.json` says; None if what is read is not to be verified.
        **options: Of fsspec.
    """

    def __init__(self, path: str, contents: Contents | None = None, **options: Any) -> None:
        super().__init__(path, **options)
        self._contents = contents
        self._description: Metadata | None = None
        self._checksums: Mapping[MetadataIndex, int] = {}
        self._own: Final = threading.local()

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The description of what the checkpoint holds, read once.

        Raises:
            OSError: It cannot be read.
            DamageError: It is not what was written.
            pickle.UnpicklingError: It is damaged, or names what no description of tensors needs.
        """
        if self._description is not None:
            return self._description
        with self.fs.create_stream(self._get_metadata_path(), "rb") as file:
            content = file.read()
        if self._contents is not None and zlib.crc32(content) != self._contents.metadata:
            raise DamageError(f"{METADATA} is not what was written (its checksum differs)")
        try:
            said = _Description(io.BytesIO(content)).load()
            if self._contents is not None:
                self._checksums = _made(said["planner_data"], dict[MetadataIndex, int])
            self._description = Metadata(
                state_dict_metadata=_made(said["state_dict_metadata"], dict[str, TensorStorageMetadata]),
                storage_data=_made(said["storage_data"], dict[MetadataIndex, _StorageInfo]),
                storage_meta=StorageMeta(load_id=self.load_id),
            )
        except _DAMAGE as error:
            reason = f"{type(error).__name__}: {error}"
            raise pickle.UnpicklingError(f"its description cannot be read ({reason})") from error
        return self._description

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and verify each part that a plan needs some of, several files at once.

        Raises:
            OSError: A file cannot be opened.
            DamageError: A part is not what was written, or cannot be read.
        """
        in_file: dict[str, list[ReadItem]] = {}
        for item in sorted(plan.items, key=lambda item: self._place(item).offset):
            in_file.setdefault(self._place(item).relative_path, []).append(item)

        def read(name: str) -> None:
            with self.fs.create_stream(self.fs.concat_path(self.path, name), "rb") as file:
                for item in in_file[name]:
                    part = self._part(file, item)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(narrow_tensor_by_index(part, item.storage_offsets, item.lengths))
                    planner.commit_tensor(item, target)

        with ThreadPoolExecutor(THREADS, "checkpoint-file") as threads:
            # What fails in one is raised here, and files that are not begun are left alone.
            for _ in map(read, in_file) if len(in_file) == 1 else threads.map(read, in_file):
                pass
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place(self, item: ReadItem) -> _StorageInfo:
        place: _StorageInfo = self.storage_data[item.storage_index]
        return place

    def _part(self, file: Any, item: ReadItem) -> torch.Tensor:
        place = self._place(item)
        named = f"{place.relative_path}: {item.storage_index.fqn}"
        stream = self._slice_file(file, place)
        try:
            if self._contents is None:
                part: torch.Tensor = torch.load(stream, map_location="cpu", weights_only=True)
                return part
            part, found = self._summed(stream, item)
        except (OSError, RuntimeError, pickle.UnpicklingError, *_DAMAGE) as error:
            if is_out_of_reach(error):
                raise
            # torch's own words advise to load it all the same.
            reason = error if isinstance(error, OSError) else type(error).__name__
            raise DamageError(f"{named} cannot be read ({reason})") from error
        if found != self._checksums.get(item.storage_index):
            raise DamageError(f"{named} is not what was written (its checksum differs)")
        return part

    def _summed(self, stream: Any, item: ReadItem) -> tuple[torch.Tensor, int]:
        """A part, in memory that the next one is read into, and its checksum."""
        entry, index = self.read_metadata().state_dict_metadata[item.storage_index.fqn], item.storage_index.index
        assert isinstance(entry, TensorStorageMetadata)
        assert index is not None, "torch notes which of the parts it is"
        dtype, sizes = entry.properties.dtype, entry.chunks[index].sizes
        num_bytes = sizes.numel() * dtype.itemsize
        memory: torch.Tensor | None = getattr(self._own, "memory", None)
        if memory is None or num_bytes > len(memory):
            memory = self._own.memory = torch.empty(num_bytes, dtype=torch.uint8)
        values = memory[:num_bytes]
        # torch has no public word for where it put the values; they are as they were in memory.
        archive: Any = torch._C.PyTorchFileReader(stream)  # noqa: SLF001
        stream.seek(archive.get_record_offset("data/0"))
        found = checksum(values, dtype, sizes, fill=lambda block: stream.readinto(block.numpy()))
        return values.view(dtype).view(sizes), found


def load_shares(
    path: str, targets: Mapping[str, LocalShard], shapes: Mapping[str, Sequence[int]] | None = None
) -> None:
    """Overwrite shares of tensors with what a checkpoint holds of them.

    Args:
        path: Path or URL of the checkpoint.
        targets: What this process holds, by the names in the checkpoint.
        shapes: Of all tensors that the checkpoint should have, whoever holds them; None if it may have any others.

    Raises:
        CheckpointError: The checkpoint is of another model, or out of reach.
        DamagedCheckpointError: It is not what was written, or not all of it is there.
    """
    contents = require_whole(path).contents
    if contents is None:
        _LOG.warning("%s is of a release that noted no checksums: what is read of it is not verified", path)
    try:
        reader = CheckpointReader(path, contents, **storage_options(path))
        difference = next(_differences(reader.read_metadata(), targets, shapes), None)
        if difference is not None:
            raise CheckpointError(f"{path} is of another model: {difference}")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            load(
                {name: share.tensor for name, share in targets.items()},
                storage_reader=reader,
                planner=SharesToLoad(targets),
                no_dist=True,
            )
    except failures(*READ_ERRORS) as error:
        wrapped = error.failures.values() if isinstance(error, CheckpointException) else ()
        first = next((failure for failure, _ in wrapped), error)
        if isinstance(first, UnlikeError):
            raise CheckpointError(f"{path} is of another model: {first}") from error
        if is_out_of_reach(first):
            raise CheckpointError(f"{path} is out of reach: {reason_of(error)}") from error
        reason = first if isinstance(first, DamageError) else reason_of(error)
        raise DamagedCheckpointError(f"{path} is damaged: {reason}") from error


def _differences(
    metadata: Metadata, targets: Mapping[str, LocalShard], shapes: Mapping[str, Sequence[int]] | None
) -> Iterator[str]:
    saved = metadata.state_dict_metadata
    # Those of the whole replica first, so that all of its processes find the same difference.
    own = {name: share.shape for name, share in targets.items()}
    for name, shape in {**(shapes or {}), **own}.items():
        entry = saved.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            yield f"it lacks {name}"
        elif name != RNG and tuple(entry.size) != tuple(shape):
            yield f"{name} has shape {tuple(entry.size)} there and {tuple(shape)} here"
    for name in saved:
        if shapes is not None and name not in shapes:
            yield f"it has {name}, which this model lacks"


class _Part(dict[str, Any]):
    """In place of an object: its attributes.

    As `__setstate__` is found on the class, too, a pickle that gives the class a state (with which pickle would set
    attributes of the class) gets a TypeError.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]  # some are keys of the description

    def __setstate__(self, state: Any) -> None:
        self.update(state)


class _Properties(_Part):
    """The properties of a tensor, of which only the dtype matters."""

    def __setstate__(self, state: Any) -> None:
        dtype, *_ = state
        self["dtype"] = dtype


_METADATA: Final = "torch.distributed.checkpoint.metadata"
_STAND_INS: Final[Mapping[tuple[str, str], type]] = {
    (_METADATA, "Metadata"): _Part,
    (_METADATA, "StorageMeta"): _Part,
    (_METADATA, "MetadataIndex"): _Part,
    (_METADATA, "TensorStorageMetadata"): _Part,
    (_METADATA, "ChunkStorageMetadata"): _Part,
    (_METADATA, "TensorProperties"): _Properties,
    (_METADATA, "_MEM_FORMAT_ENCODING"): int,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Part,
    ("torch.serialization", "_get_layout"): str,
    ("torch", "Size"): tuple,
}


class _Description(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        try:
            return _STAND_INS[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"its description names {module}.{name}, which no tensor needs; it is not trusted"
            ) from None


def _made(said: Any, kind: Any) -> Any:
    """Make objects of torch's from their descriptions."""
    return msgspec.convert(said, kind, dec_hook=_decode)


def _decode(kind: type, said: Any) -> Any:
    if kind is torch.Size:
        return torch.Size(said)
    if isinstance(said, kind):
        return said
    raise TypeError(f"{said!r:.80} is no {kind.__name__}")


def restore(
    trainer: Trainer, path: str, begin_stage: Callable[[int], None], *, run_id: str = "", name: str = "this model"
) -> None:
    """Load weights, optimizer, step and random state, whatever layout they were saved from.

    All processes of the replica call it, and each reads what it holds.

    Args:
        trainer: Overwritten.
        path: Path or URL of the checkpoint.
        begin_stage: Makes the trainer take up a stage, by index.
        run_id: Of the run that goes on; empty if any run's checkpoint will do.
        name: Of the model that is trained, for people.

    Raises:
        CheckpointError: The checkpoint is of another run, of another model, or out of reach.
        DamagedCheckpointError: It is not what was written, or not all of it is there.
    """
    place = read_place(path)
    if run_id and place.run_id != run_id:
        raise CheckpointError(
            f"{path} is of run {place.run_id!r}, and {run_id!r} goes on; give each run its own policy.checkpoint.url"
        )
    if place.stage != trainer.stage.index:
        begin_stage(place.stage)
    random = torch.get_rng_state()
    held = local_shards(trainer.state())
    # What is stored in 8 bits is read in float32, and quantised.
    coded = {key: share for key, share in held.items() if len(stored(share.tensor)) > 1}
    read = {key: attrs.evolve(share, tensor=torch.empty(share.tensor.shape)) for key, share in coded.items()}
    targets = {**held, **read, RNG: local_shard(random)}
    own = {name: share.shape for name, share in targets.items()}
    shapes: dict[str, tuple[int, ...]] = {}
    for said in trainer.world.exchange(msgspec.json.encode(own)):
        shapes |= msgspec.json.decode(said, type=dict[str, tuple[int, ...]])
    load_shares(path, targets, shapes)
    for key, share in coded.items():
        share.tensor.copy_(read[key].tensor.to(share.tensor.device))
    if place.below:
        check_below(path, expected=place.below, found=trainer.below, name=name)
    torch.set_rng_state(random)
    trainer.step = place.step
    trainer.nonfinite_steps = place.nonfinite_steps
    trainer.unimitated_steps = place.unimitated_steps
