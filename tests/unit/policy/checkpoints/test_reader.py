"""A checkpoint is data: whatever its files say, nothing is run."""

import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from cosmos_core.errors import CheckpointError
from cosmos_core.policy.checkpoints.checkpoint import COMPLETE, Place, marker
from cosmos_core.policy.checkpoints.reader import CheckpointReader
from cosmos_core.policy.checkpoints.saver import Copied, write_checkpoint
from cosmos_core.run.export import load_weights
from cosmos_core.weights.shards import local_shards

PLACE = Place(run_id="r", step=1, stage=0, nonfinite_steps=0)
NAMED = (
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.TensorProperties,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    torch.serialization._get_layout,
    torch.Size,
)
"""What a description may name."""


class Call:
    """Pickles as a call of `open(path, "w")`."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.fixture
def checkpoint(tmp_path):
    """One that says nothing of its files, so that what it is made of is all that is checked."""
    tensors = {
        f"model.{name}": torch.arange(6).reshape(2, 3).to(dtype)
        for name, dtype in (("weight", torch.float32), ("half", torch.bfloat16), ("count", torch.int64))
    }
    path = write_checkpoint(str(tmp_path / "checkpoints"), Copied(place=PLACE, shares=local_shards(tensors)))
    Path(path, COMPLETE).write_bytes(marker(PLACE))
    return path


@pytest.fixture
def module():
    made = torch.nn.Module()
    made.weight = torch.nn.Parameter(torch.zeros(2, 3))
    return made


def test_what_was_written_is_read(checkpoint, module, monkeypatch):
    # One file needs no threads.
    monkeypatch.delattr(ThreadPoolExecutor, "submit")
    held = CheckpointReader(checkpoint).read_metadata().state_dict_metadata
    found = {name: (tuple(each.size), each.properties.dtype) for name, each in held.items()}
    assert found == {
        "model.weight": ((2, 3), torch.float32),
        "model.half": ((2, 3), torch.bfloat16),
        "model.count": ((2, 3), torch.int64),
    }
    load_weights(module, checkpoint)
    assert module.weight.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_a_description_that_calls_something_is_refused(checkpoint, module, tmp_path):
    Path(checkpoint, ".metadata").write_bytes(pickle.dumps(Call(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"its description names io\.open, which no tensor needs"):
        load_weights(module, checkpoint)
    assert not (tmp_path / "ran").exists()


def test_a_part_that_is_a_pickle_is_refused(checkpoint, module, tmp_path):
    """torch would unpickle such a part without any limit."""
    stored = CheckpointReader(checkpoint).read_metadata().storage_data
    ((key, info),) = ((key, info) for key, info in stored.items() if key.fqn == "model.weight")
    part = io.BytesIO()
    torch.save(Call(tmp_path / "ran"), part)
    Path(checkpoint, info.relative_path).write_bytes(part.getvalue())
    info.offset, info.length = 0, len(part.getvalue())
    stolen = Metadata({"model.weight": BytesStorageMetadata()}, storage_data={type(key)("model.weight"): info})
    Path(checkpoint, ".metadata").write_bytes(pickle.dumps(stolen))
    with pytest.raises(CheckpointError, match=r"names torch\.distributed\.checkpoint\.metadata\.BytesStorageMetadata"):
        load_weights(module, checkpoint)
    assert not (tmp_path / "ran").exists()


def named(thing):
    """The opcode that puts what a module holds onto the stack."""
    return f"c{thing.__module__}\n{thing.__qualname__}\n".encode()


def before_it(checkpoint, whole, opcodes):
    """Make the description do something first, and then describe the checkpoint as it did."""
    Path(checkpoint, ".metadata").write_bytes(pickle.PROTO + b"\x04" + opcodes + pickle.POP + whole)


def test_what_a_description_names_cannot_be_changed(checkpoint, module):
    """pickle sets attributes of whatever is given a state; torch's writer imports what `__module__` says."""
    whole = Path(checkpoint, ".metadata").read_bytes()
    for state in [b"(N}V__module__\nVbomb\nstb", b"}V__module__\nVbomb\nsb"]:
        for named_one in NAMED:
            was = dict(vars(named_one))
            before_it(checkpoint, whole, named(named_one) + state)
            with pytest.raises(CheckpointError, match="its description cannot be read"):
                load_weights(module, checkpoint)
            assert dict(vars(named_one)) == was


def test_what_a_description_makes_is_of_its_own(checkpoint, module):
    """The members of an enumeration and layouts are shared by the whole process."""
    whole = Path(checkpoint, ".metadata").read_bytes()
    for named_one in NAMED:
        members = [dict(vars(member)) for member in metadata._MEM_FORMAT_ENCODING]
        before_it(checkpoint, whole, named(named_one) + b"K\x00\x85R(N}V_value_\nK\x07stb")
        with pytest.raises(CheckpointError, match="its description cannot be read"):
            load_weights(module, checkpoint)
        assert [dict(vars(member)) for member in metadata._MEM_FORMAT_ENCODING] == members


class Size:
    """Pickles as a `torch.Size` of things that it cannot consist of."""

    def __init__(self, *parts):
        self.parts = parts

    def __reduce__(self):
        return (torch.Size, (self.parts,))


def test_a_description_of_wrong_types_is_refused(checkpoint, module):
    whole = Path(checkpoint, ".metadata").read_bytes()
    for place, value, seen in [
        ("tensor.size", Size("nope"), r"item 0 is 'str'\) - at `\$\[...\].size`"),
        ("tensor.size", 3, "'int' object is not iterable"),
        ("tensor.chunks", None, "Expected `array`, got `null`"),
        ("chunk.offsets", "00", "item 0 is 'str'"),
        ("properties.dtype", "torch.float32", "'torch.float32' is no dtype"),
        ("index.fqn", 1, "Expected `str`, got `int`"),
        ("stored.relative_path", 1, "Expected `str`, got `int`"),
        ("stored.length", "1", "Expected `int`, got `str`"),
    ]:
        Path(checkpoint, ".metadata").write_bytes(whole)
        description = CheckpointReader(checkpoint).read_metadata()
        tensor = description.state_dict_metadata["model.weight"]
        index, stored = next(iter(description.storage_data.items()))
        parts = {
            "tensor": tensor,
            "chunk": tensor.chunks[0],
            "properties": tensor.properties,
            "index": index,
            "stored": stored,
        }
        part, field = place.split(".")
        object.__setattr__(parts[part], field, value)
        Path(checkpoint, ".metadata").write_bytes(pickle.dumps(description))
        with pytest.raises(CheckpointError, match=seen):
            load_weights(module, checkpoint)


def test_a_damaged_description_is_refused_wherever_it_ends(checkpoint, module):
    path = Path(checkpoint, ".metadata")
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="is damaged"):
            load_weights(module, checkpoint)
