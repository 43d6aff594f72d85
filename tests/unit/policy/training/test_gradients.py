import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from cosmos_core.errors import TrainingError
from cosmos_core.policy.training import gradients
from cosmos_core.policy.training.gradients import GradientBuffer, num_copies
from cosmos_core.testing.worlds import run_world


def norm(buffer):
    return float(buffer.square()) ** 0.5


def test_gradients_lie_in_one_buffer():
    module = torch.nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    buffer = GradientBuffer(dict(module.named_parameters()))
    assert buffer.flat.numel() == 4
    for _ in range(2):
        module(torch.tensor([[1.0, 2.0]])).sum().backward()
    assert buffer.flat.tolist() == [2.0, 4.0, 2.0, 4.0]
    assert norm(buffer) == pytest.approx(40**0.5)
    buffer.clip(norm(buffer), 0.0)
    assert norm(buffer) == pytest.approx(40**0.5)
    buffer.clip(norm(buffer), 2.0)
    assert abs(norm(buffer) - 2.0) < 1e-5
    buffer.zero()
    assert module.weight.grad.abs().sum().item() == 0.0


def test_what_autograd_put_elsewhere_is_collected():
    module = torch.nn.Linear(2, 1, bias=False)
    buffer = GradientBuffer(dict(module.named_parameters()))
    module.weight.grad = torch.tensor([[3.0, 4.0]])
    buffer.collect()
    assert buffer.flat.tolist() == [3.0, 4.0]
    assert buffer.of("weight").tolist() == [[3.0, 4.0]]
    module.weight.grad += 1.0
    assert buffer.flat.tolist() == [4.0, 5.0]


def test_what_is_held_twice_counts_half():
    parameters = {name: torch.nn.Parameter(torch.zeros(1)) for name in ("a", "b", "c")}
    buffer = GradientBuffer(parameters, processes=2, twice=("b",))
    buffer.flat += 2.0
    assert float(buffer.square()) == pytest.approx(4 / 2 + 4 / 4 + 4 / 2)


def test_a_norm_is_taken_part_by_part(monkeypatch):
    sizes = []
    norm_of = torch.linalg.vector_norm
    monkeypatch.setattr(gradients, "_SQUARED_AT_ONCE", 4)
    monkeypatch.setattr(
        torch.linalg, "vector_norm", lambda part, **named: sizes.append(part.numel()) or norm_of(part, **named)
    )
    buffer = GradientBuffer({"a": torch.nn.Parameter(torch.zeros(7)), "b": torch.nn.Parameter(torch.zeros(2, 2))})
    buffer.flat += torch.arange(1.0, 12.0)
    assert float(buffer.square()) == pytest.approx(sum(each**2 for each in range(1, 12)))
    assert max(sizes) == 4


def test_a_process_may_have_nothing_to_train():
    buffer = GradientBuffer({})
    assert float(buffer.square()) == 0.0


def test_gradients_in_few_bits_or_of_several_kinds_are_refused():
    for dtypes in [["bfloat16"], ["float32", "float64"]]:
        parameters = {name: torch.nn.Parameter(torch.zeros(2, dtype=getattr(torch, name))) for name in dtypes}
        with pytest.raises(
            TrainingError, match=f"parameters of torch.{', torch.'.join(dtypes)}: gradients are added up"
        ):
            GradientBuffer(parameters)


def test_gradients_have_the_dtype_of_what_is_trained():
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    assert GradientBuffer({"weight": weight}).flat.dtype == torch.float64


def test_nothing_to_train_is_where_the_weights_are():
    frozen = torch.nn.Parameter(torch.empty(2, device="meta"), requires_grad=False)
    buffer = GradientBuffer({"frozen": frozen})
    assert buffer.flat.shape == (0,)
    assert buffer.square().device == frozen.device


def offloaded():
    """A shard in the CPU's memory of a parameter of accelerators, as FSDP makes them; there need be no accelerator."""
    mesh = DeviceMesh("cuda", torch.arange(2), mesh_dim_names=("fsdp",), _init_backend=False)
    facts = TensorMeta(torch.Size((4, 3)), (3, 1), torch.float32)
    shard = DTensor(torch.ones(2, 3), DTensorSpec(mesh, (Shard(0),), tensor_meta=facts), requires_grad=False)
    weight = torch.nn.Parameter(shard)
    buffer = GradientBuffer({"weight": weight}, processes=2)
    buffer.flat += 2.0
    return weight.grad.to_local().tolist(), weight.grad.device


def test_gradients_stay_where_the_shards_are():
    assert run_world(2, offloaded) == [([[2.0] * 3] * 2, torch.device("cpu"))] * 2


def sharded():
    """A parameter over two of four processes, and one that all hold; gradients from two backward passes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    weight = torch.nn.Parameter(distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Replicate(), Shard(0)]))
    plain = torch.nn.Parameter(torch.ones(2))
    buffer = GradientBuffer({"weight": weight, "plain": plain}, processes=4)
    for _ in range(2):
        (weight.to_local() * 3.0).sum().backward()
        (plain * 2.0).sum().backward()
    buffer.collect()
    total = buffer.square()
    dist.all_reduce(total)
    buffer.clip(2.0, 1.0)
    assert isinstance(weight.grad, DTensor)
    return float(total), weight.grad.full_tensor(), num_copies(weight, 4), buffer.flat.numel()


def test_shards_are_counted_once():
    results = run_world(4, sharded)
    for total, gradient, copies, _ in results:
        assert total == pytest.approx(6 * 6.0**2 + 2 * 4.0**2)
        assert torch.allclose(gradient, torch.full((3, 2), 3.0))
        assert copies == 2
    assert [size for *_, size in results] == [6, 4, 6, 4]
