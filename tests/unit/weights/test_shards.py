import pytest
import torch

from cosmos_core.errors import WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.weights.shards import ShardMap, TensorFacts, canonical_tensors, torch_dtype


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


def test_a_module_travels_as_its_parameters_once_and_its_persistent_float_buffers():
    tensors = canonical_tensors(Tied())
    assert list(tensors) == ["embed.weight", "scale"]
    assert not any(tensor.requires_grad for tensor in tensors.values())


def test_tensors_make_one_rank_of_whole_tensors():
    tensors = {"w": torch.zeros(2, 3), "n": torch.zeros(2, dtype=torch.int64)}
    shards = ShardMap.of_tensors(tensors, dtype=torch.bfloat16)
    assert shards.tensors == {
        "w": TensorFacts(shape=(2, 3), dtype="bfloat16"),
        "n": TensorFacts(shape=(2,), dtype="int64"),
    }
    assert shards.ranks[0][0] == TensorSlice(name="w", start=(0, 0), shape=(2, 3))


def test_an_engines_ranks_together_say_how_large_a_tensor_is():
    halves = {rank: [(TensorSlice(name="w", start=(0, 2 * rank), shape=(3, 2)), "torch.bfloat16")] for rank in range(2)}
    shards = ShardMap.of_layout(halves)
    assert shards.tensors["w"] == TensorFacts(shape=(3, 4), dtype="bfloat16")
    assert set(shards.ranks) == {0, 1}


def test_ranks_that_disagree_are_refused():
    piece = TensorSlice(name="w", start=(0,), shape=(2,))
    with pytest.raises(WeightSyncError, match="w: the engine's ranks disagree: float32"):
        ShardMap.of_layout({0: [(piece, "float32")], 1: [(piece, "bfloat16")]})


def test_an_unknown_dtype_is_refused():
    with pytest.raises(WeightSyncError, match="'float3' is not a torch dtype"):
        torch_dtype("float3")
