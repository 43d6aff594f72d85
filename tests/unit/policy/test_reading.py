"""A checkpoint is data: whatever its files say, nothing is run."""

import io
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from cosmos_core.errors import CheckpointError
from cosmos_core.policy.checkpoint import Place
from cosmos_core.policy.reading import CheckpointReader
from cosmos_core.policy.saving import Copied, write_checkpoint
from cosmos_core.run.export import load_weights

PLACE = Place(run_id="r", step=1, stage=0, nonfinite_steps=0)


class Call:
    """Pickles as a call of `open(path, "w")`."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.fixture
def checkpoint(tmp_path):
    tensors = {
        f"model.{name}": torch.arange(6).reshape(2, 3).to(dtype)
        for name, dtype in (("weight", torch.float32), ("half", torch.bfloat16), ("count", torch.int64))
    }
    return write_checkpoint(str(tmp_path / "checkpoints"), Copied(place=PLACE, tensors=tensors))


@pytest.fixture
def module():
    made = torch.nn.Module()
    made.weight = torch.nn.Parameter(torch.zeros(2, 3))
    return made


def test_what_was_written_is_read(checkpoint, module):
    metadata = CheckpointReader(checkpoint).read_metadata()
    found = {name: (tuple(each.size), each.properties.dtype) for name, each in metadata.state_dict_metadata.items()}
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
    metadata = CheckpointReader(checkpoint).read_metadata()
    stored = {key: value for key, value in metadata.storage_data.items() if key.fqn == "model.weight"}
    ((key, info),) = stored.items()
    part = io.BytesIO()
    torch.save(Call(tmp_path / "ran"), part)
    Path(checkpoint, info.relative_path).write_bytes(part.getvalue())
    info.offset, info.length = 0, len(part.getvalue())
    stolen = Metadata({"model.weight": BytesStorageMetadata()}, storage_data={type(key)("model.weight"): info})
    Path(checkpoint, ".metadata").write_bytes(pickle.dumps(stolen))
    with pytest.raises(CheckpointError, match=r"names torch\.distributed\.checkpoint\.metadata\.BytesStorageMetadata"):
        load_weights(module, checkpoint)
    assert not (tmp_path / "ran").exists()
