"""The policy's step on one device, against the CPU: in bf16, compiled, in 8 bits; digests; collectives over NCCL."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cosmos_core.config.schema import Float8Config, ParallelConfig, PolicyConfig
from cosmos_core.models import tokens_payload
from cosmos_core.models.attention.context import attend_over_slices
from cosmos_core.models.attention.documents import ContextSlice, Packing
from cosmos_core.models.attention.softmax import Scoring
from cosmos_core.models.parallel.collectives import (
    all_to_all,
    copy_to_group,
    gather_dim,
    gather_for_shared,
    reduce_scatter_dim,
    split_dim,
    sum_over_group,
)
from cosmos_core.models.parallel.float8 import Quantised, multiply, quantise
from cosmos_core.policy.processes.world import single_world
from cosmos_core.testing.layouts import make_trainer, train_step, worst_error
from cosmos_core.weights.digest import digest_of
from tests.families import CONFIGS, family, text_payloads

pytestmark = [
    pytest.mark.gpu,
    # torch's compiler warns of what a device could do, and of what it looks at itself.
    pytest.mark.filterwarnings("default::UserWarning"),
    # The first graph of a process takes a while.
    pytest.mark.timeout(300),
]

CPU = torch.device("cpu")
UNITS = 256


def step(device, *, precision="fp32", compiled="off", recompute="none", scaling="none", name="qwen3", payloads=None):
    """The loss and the gradients of a step, on the CPU."""
    policy = PolicyConfig(
        precision=precision,
        micro_batch_units=UNITS,
        parallel=ParallelConfig(compile=compiled, recompute=recompute),
        float8=Float8Config(scaling=scaling),
    )
    trainer = make_trainer(family("hf", CONFIGS[name])(), policy, single_world(), device=device)
    meter = train_step(trainer, text_payloads() if payloads is None else payloads)
    gradients = {key: each.grad.float().cpu() for key, each in trainer.module.named_parameters()}
    return meter.sums["loss"], gradients


def whole_error(found, expected):
    """Relative error of all gradients as one vector."""
    assert found.keys() == expected.keys()
    return worst_error(*({"all": torch.cat([side[key].flatten() for key in expected])} for side in (found, expected)))[
        1
    ]


@pytest.mark.parametrize("name", ["llama", "qwen3-tied", "qwen3-moe", "deepseek-v3"])
def test_float32_is_that_of_the_cpu(device, name):
    expected, found = step(CPU, name=name), step(device, name=name)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert whole_error(found[1], expected[1]) <= 1e-3


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("compiled", ["off", "on"])
def test_bfloat16_is_near(cuda, compiled, recompute):
    expected = step(CPU)
    found = step(cuda, precision="bf16", compiled=compiled, recompute=recompute)
    assert found[0] == pytest.approx(expected[0], rel=1e-2)
    assert whole_error(found[1], expected[1]) <= 0.1


@pytest.mark.parametrize("compiled", ["off", "on"])
@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_experts_are_near(cuda, name, compiled):
    expected = step(CPU, name=name)
    found = step(cuda, name=name, precision="bf16", compiled=compiled)
    assert found[0] == pytest.approx(expected[0], rel=1e-2)
    # On a GPU of compute capability 9.0 experts are in 8 bits, too.
    if torch.cuda.get_device_capability(cuda) >= (9, 0):
        found = step(cuda, name=name, precision="bf16", compiled=compiled, scaling="rowwise")
        assert found[0] == pytest.approx(expected[0], rel=3e-2)


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("shape", [(256, 128, 64), (37, 128, 51)])
@pytest.mark.parametrize("left", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_product_of_8_bits_is_that_of_what_they_stand_for(device, left, shape, scaling):
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("the device has no 8-bit products")
    rows, inner, columns = shape
    draw = torch.Generator().manual_seed(0)
    drawn = [torch.randn(size, inner, generator=draw) for size in (rows, columns)]
    parts = [quantise(drawn[0], left, scaling), quantise(drawn[1], torch.float8_e4m3fn, scaling)]
    expected = (parts[0].values_RK.double() * parts[0].scale) @ (parts[1].values_RK.double() * parts[1].scale).T
    moved = [Quantised(values_RK=each.values_RK.to(device), scale=each.scale.to(device)) for each in parts]
    found = multiply(*moved, torch.bfloat16)
    assert found.shape == (rows, columns)
    assert (found.double().cpu() - expected).norm() <= 1e-2 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8])
def test_digests_are_those_of_the_cpu(device, dtype):
    weights = {"w": (100 * torch.randn(301, 70, generator=torch.Generator().manual_seed(0))).to(dtype)}
    assert digest_of({name: each.to(device) for name, each in weights.items()}) == digest_of(weights)


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("compiled", ["off", "on"])
def test_float8_is_near(cuda, scaling, compiled):
    if torch.cuda.get_device_capability(cuda) < (9, 0):
        pytest.skip("the device has no 8-bit products")
    expected = step(CPU)
    found = step(cuda, precision="bf16", compiled=compiled, scaling=scaling)
    assert found[0] == pytest.approx(expected[0], rel=3e-2)
    assert whole_error(found[1], expected[1]) <= 0.3
    assert whole_error(found[1], step(cuda, precision="bf16")[1]) > 0.0


def test_ragged_documents(cuda):
    draw = np.random.default_rng(1)
    lengths = [60, 58, 33, 31, 30, 9, 8, 7, 7, 5]
    payloads = [tokens_payload(draw.integers(0, 240, 3), draw.integers(0, 240, length - 2)) for length in lengths]
    expected, found = step(CPU, payloads=payloads), step(cuda, payloads=payloads)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert whole_error(found[1], expected[1]) <= 1e-3


@pytest.fixture
def alone(tmp_path, device):
    """A process group of this process alone, over NCCL on a GPU."""
    over, of = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    dist.init_process_group(over, init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1, device_id=of)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "collective",
    [
        copy_to_group,
        sum_over_group,
        lambda tensor, group: gather_dim(tensor, 1, group),
        lambda tensor, group: gather_for_shared(tensor, 1, group),
        lambda tensor, group: reduce_scatter_dim(tensor, 1, group),
        lambda tensor, group: split_dim(tensor, 1, group),
        all_to_all,
        lambda tensor, group: all_to_all(tensor, group, receive=[4], send=[4]),
    ],
)
def test_a_collective_alone_changes_nothing(alone, device, collective):
    tensor = torch.randn(4, 6, device=device, requires_grad=True)
    weights = torch.randn(4, 6, device=device)
    result = collective(tensor, alone)
    torch.testing.assert_close(result, tensor)
    torch.dot(result.flatten(), weights.flatten()).backward()
    torch.testing.assert_close(tensor.grad, weights)


@pytest.mark.parametrize("method", ["ulysses", "gather", "ring"])
def test_attention_over_slices_of_a_row(alone, device, method):
    """The only slice of a row: every method gives what attention over the row gives, on the CPU."""
    lengths, heads, kv_heads, width = (40, 17, 7), 4, 2, 16
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randn(sum(lengths), n, width, generator=draw) for n in (heads, kv_heads, kv_heads)]
    weights = torch.randn(sum(lengths), heads, width, generator=draw)

    def run(where, context):
        parts = [row.to(where).requires_grad_() for row in rows]
        packing = Packing.of(lengths, where, context=context)
        output = attend_over_slices(tuple(parts), packing, Scoring(scale=None))
        (output * weights.to(where)).sum().backward()
        return [output.detach().cpu(), *(part.grad.cpu() for part in parts)]

    context = ContextSlice(group=alone, place=0, size=1, method=method)
    expected = reference(rows, lengths, weights)
    for found, wanted in zip(run(device, context), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def reference(rows, lengths, weights):
    """Each document by itself."""
    parts = [row.clone().requires_grad_() for row in rows]
    outputs = []
    for query, key, value in zip(*(part.split(lengths) for part in parts), strict=True):
        heads = [row.transpose(0, 1)[None] for row in (query, key, value)]
        attended = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        outputs.append(attended[0].transpose(0, 1))
    output = torch.cat(outputs)
    (output * weights).sum().backward()
    return [output.detach(), *(part.grad for part in parts)]
