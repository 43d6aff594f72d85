"""Experts on a GPU: grouped products in bfloat16 and in 8 bits against the CPU, and no wait for the device."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from cosmos_core.models.parallel.float8 import EXPERTS_CAPABILITY, float8_product
from cosmos_core.models.parallel.grouped import GROUPED, PRODUCT

pytestmark = pytest.mark.gpu

TOKENS, HIDDEN, INNER, EXPERTS, CHOICES = 301, 128, 64, 8, 3


def experts(device, product=None):
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": EXPERTS}
    module = Qwen3MoeExperts(Qwen3MoeConfig(experts_implementation=GROUPED, **sizes))
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for each in module.parameters():
            each.copy_(torch.randn(each.shape, generator=draw) / 8)
    if product is not None:
        setattr(module, PRODUCT, product)
    return module.to(device)


def operands(device):
    """Two experts are chosen by no token."""
    draw = torch.Generator().manual_seed(0)
    used = torch.multinomial(torch.arange(1.0, EXPERTS - 1).expand(TOKENS, -1), CHOICES, generator=draw)
    hidden, weights = torch.randn(TOKENS, HIDDEN, generator=draw), torch.rand(TOKENS, CHOICES, generator=draw)
    return hidden.to(device).requires_grad_(), (used + 1).to(device), weights.to(device).requires_grad_()


def step(module, given, upstream):
    """The output and all gradients, under autocast; nothing is read of them."""
    module.zero_grad()
    with torch.autocast(given[0].device.type, torch.bfloat16):
        output = module(*given)
    output.backward(upstream)
    return {"output": output.detach(), "hidden": given[0].grad, "weights": given[2].grad} | {
        name: each.grad for name, each in module.named_parameters()
    }


def compared(found, expected, bound):
    for name, value in expected.items():
        assert (found[name].cpu() - value).norm() <= bound * value.norm(), name
    for name in ("gate_up_proj", "down_proj"):
        assert not found[name][[0, EXPERTS - 1]].any(), "an expert without tokens has a gradient"


@pytest.mark.parametrize("is_float8", [False, True])
def test_near_the_cpu_without_waiting(cuda, is_float8):
    capability = torch.cuda.get_device_capability(cuda)
    if is_float8 and capability != EXPERTS_CAPABILITY:
        pytest.skip(f"experts compute in 8 bits on compute capability 9.0 only, and the device has {capability}")
    product, cpu = float8_product if is_float8 else None, torch.device("cpu")
    upstream = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2))
    expected = step(experts(cpu, product), operands(cpu), upstream)
    module, above = experts(cuda, product), upstream.to(cuda)
    step(module, operands(cuda), above)  # a first call makes handles and workspaces
    given = operands(cuda)
    torch.cuda.synchronize()
    if capability in {(9, 0), (10, 0)}:
        torch.cuda.set_sync_debug_mode("error")
    try:
        found = step(module, given, above)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    compared(found, expected, 2e-2 if is_float8 else 1e-2)


@pytest.mark.parametrize("mode", ["off", "on"])
def test_a_rollout_waits_for_nothing(cuda, mode):
    """Weights that are held in bfloat16, as the embedded engine holds them."""
    if torch.cuda.get_device_capability(cuda) not in {(9, 0), (10, 0)}:
        pytest.skip("the device has no grouped products")
    module, (hidden, chosen, weights) = experts(cuda).bfloat16(), operands(cuda)
    run = torch.compile(module.forward, fullgraph=True) if mode == "on" else module
    given = hidden.bfloat16(), chosen, weights
    with torch.no_grad():
        first = run(*given)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            again = run(*given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, again)
