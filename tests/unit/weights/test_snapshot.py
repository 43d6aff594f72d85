import numpy as np
import torch

from cosmos_core.protocols import TensorSlice
from cosmos_core.weights import server, slices
from cosmos_core.weights.digest import add_digests, tensor_digests
from cosmos_core.weights.shards import LocalShard, TensorShard
from cosmos_core.weights.snapshot import take_snapshot, view

torch.set_num_threads(1)


def test_a_snapshot_is_a_copy_in_the_rollouts_dtype(tmp_path):
    tensors = {
        "w": torch.randn(3, 5),
        "transposed": torch.randn(4, 6).t(),
        "count": torch.tensor([1, 2, 3]),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }
    expected = {name: t.clone() if name == "count" else t.bfloat16() for name, t in tensors.items()}
    snapshot = take_snapshot(3, tensors, torch.bfloat16, directory=tmp_path)
    for tensor in tensors.values():
        tensor.zero_()
    for entry in snapshot.entries:
        assert torch.equal(view(snapshot.file.buffer, entry), expected[entry.name])
        assert entry.offset % 64 == 0
    assert snapshot.digests() == tensor_digests(expected)
    assert snapshot.nbytes == sum(t.numel() * t.element_size() for t in expected.values())


def test_slices_are_read_as_they_lie_or_gathered(tmp_path):
    tensor = torch.arange(24, dtype=torch.float32).view(4, 6)
    snapshot = take_snapshot(1, {"w": tensor}, None, directory=tmp_path)
    for start, shape in (((1, 0), (2, 6)), ((0, 2), (4, 3)), ((3, 5), (1, 1))):
        data = snapshot.read(TensorSlice(name="w", start=start, shape=shape))
        expected = tensor[start[0] : start[0] + shape[0], start[1] : start[1] + shape[1]]
        assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape), expected)
    data = snapshot.read(TensorSlice(name="w", start=(1, 0), shape=(2, 6)))
    assert np.shares_memory(data, snapshot.file.buffer)
    assert snapshot.read(TensorSlice(name="w", start=(1, 0), shape=(0, 6))) == b""
    assert snapshot.read(TensorSlice(name="w", start=(3, 0), shape=(2, 6))) is None
    assert snapshot.read(TensorSlice(name="v", start=(0, 0), shape=(1, 1))) is None
    again = take_snapshot(2, {"w": tensor}, None, directory=tmp_path, spare=snapshot.file)
    assert again.file is not snapshot.file, "a part of it is held"


def test_reading_does_not_look_at_the_other_tensors(tmp_path, monkeypatch):
    snapshot = take_snapshot(
        1, {f"w{number}": torch.full((2,), number) for number in range(200)}, None, directory=tmp_path
    )
    looked_at, contains, facts = [], slices.contains, TensorShard.facts.fget
    monkeypatch.setattr(slices, "contains", lambda *pieces: looked_at.append(pieces) or contains(*pieces))
    monkeypatch.setattr(TensorShard, "facts", property(lambda entry: looked_at.append(entry) or facts(entry)))
    pieces = [TensorSlice(name=f"w{number}", start=(1,), shape=(1,)) for number in range(200)]
    for number, piece in enumerate(pieces):
        assert server._excess(snapshot, [piece]) == ""
        assert torch.frombuffer(bytearray(snapshot.read(piece)), dtype=torch.int64).tolist() == [number]
    assert len(looked_at) == 200


def test_two_ranks_that_hold_halves_attest_the_whole_together(tmp_path):
    tensor = torch.randn(4, 6)
    halves = [
        take_snapshot(
            1,
            {"w": LocalShard(tensor=tensor[:, 3 * rank : 3 * rank + 3], start=(0, 3 * rank), shape=(4, 6))},
            None,
            directory=tmp_path,
        )
        for rank in range(2)
    ]
    assert add_digests(half.digests() for half in halves) == tensor_digests({"w": tensor})
    assert halves[1].read(TensorSlice(name="w", start=(0, 3), shape=(4, 3))) is not None
    assert halves[1].read(TensorSlice(name="w", start=(0, 2), shape=(4, 3))) is None
