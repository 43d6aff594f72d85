"""Experts as grouped products, against transformers' loop over experts."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from cosmos_core.models.parallel import compiled, grouped
from cosmos_core.models.parallel.grouped import GROUPED
from cosmos_core.policy.mesh.mesh import single
from cosmos_core.protocols import Layout

HIDDEN, INNER, EXPERTS, TOKENS, CHOICES = 32, 16, 6, 23, 3
SIZES = {"hidden_size": HIDDEN, "intermediate_size": INNER, "moe_intermediate_size": INNER, "num_experts_per_tok": 3}
COUNTS = {"num_experts": EXPERTS, "n_routed_experts": EXPERTS, "num_local_experts": EXPERTS}
CLASSES = {
    "qwen3_moe": Qwen3MoeExperts,
    "deepseek_v3": DeepseekV3Experts,
    "gpt_oss": GptOssExperts,  # transposed, with biases, gate and up by turns
    "nemotron_h": NemotronHExperts,  # without a gate
}


def experts_of(name, implementation=GROUPED):
    config = AutoConfig.for_model(name, **SIZES, **COUNTS)
    config._experts_implementation = implementation
    module = CLASSES[name](config)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for each in module.parameters():
            each.copy_(torch.randn(each.shape, generator=draw) / 4)
    return module


def operands():
    """Experts 0 and 4 are chosen by no token, and the others by numbers of tokens that differ."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=draw)
    liked = torch.tensor([1.0, 2.0, 3.0, 9.0])
    chosen = torch.tensor([1, 2, 3, 5])[torch.multinomial(liked.expand(TOKENS, -1), CHOICES, generator=draw)]
    return hidden, chosen, torch.rand(TOKENS, CHOICES, generator=draw)


def stepped(module, given=None, forward=None):
    """The output, and the gradients of tokens, of their experts' weights and of each parameter."""
    hidden, chosen, weights = operands() if given is None else given
    hidden, weights = (each.clone().requires_grad_() for each in (hidden, weights))
    output = (forward or module)(hidden, chosen, weights)
    (output * torch.linspace(-1, 1, output.numel(), device=output.device).view_as(output)).sum().backward()
    return {"output": output, "hidden": hidden.grad, "weights": weights.grad} | {
        name: each.grad for name, each in module.named_parameters()
    }


@pytest.mark.parametrize("name", CLASSES)
def test_equal_to_the_loop(name):
    expected, found = (stepped(experts_of(name, how)) for how in ("eager", GROUPED))
    assert found.keys() == expected.keys()
    for what, value in expected.items():
        torch.testing.assert_close(found[what], value, rtol=1e-5, atol=1e-5, msg=lambda m, what=what: f"{what}: {m}")
    assert not any(found[name][[0, 4]].any() for name in found if name.endswith("_proj"))
    assert torch.equal(stepped(experts_of(name))["hidden"], found["hidden"])


def test_under_autocast_products_are_in_its_dtype():
    exact = stepped(experts_of("qwen3_moe"))
    with torch.autocast("cpu", torch.bfloat16):
        found = stepped(experts_of("qwen3_moe"))
    for name, value in exact.items():
        assert found[name].dtype == torch.float32
        assert 1e-4 < (found[name] - value).norm() / value.norm() < 2e-2, name


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_a_gpu_is_never_waited_for(name, held, monkeypatch):
    """A tensor without storage refuses what asks for its values."""
    monkeypatch.setattr(grouped, "grouped_loop", None)
    # Not every build of torch knows the gradients of CUDA's tensors, even without storage.
    device = "cpu" if torch.version.cuda is None else "cuda"
    module = experts_of(name)
    autocast = torch.autocast(device, torch.bfloat16, enabled=held == torch.float32)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, autocast:
        for key, each in [*module.named_parameters()]:
            setattr(module, key, torch.nn.Parameter(mode.from_tensor(each.detach()).to(device, held)))
        hidden, chosen, weights = (mode.from_tensor(each).to(device) for each in operands())
        found = stepped(module, (hidden.to(held), chosen, weights))
    assert found["output"].dtype == found["down_proj"].dtype == held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_whole(dtype):
    module = experts_of("qwen3_moe").to(dtype)
    hidden, chosen, weights = operands()
    given = hidden.to(dtype), chosen, weights
    expected = stepped(module, given)
    module.zero_grad()
    torch._dynamo.reset()
    found = stepped(module, given, torch.compile(module.forward, backend="aot_eager", fullgraph=True))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


class Counted(TorchDispatchMode):
    """Counts the grouped products that run."""

    number = 0

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.number += operator in (torch.ops.aten._grouped_mm.default, torch.ops.cosmos.grouped_loop.default)
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_layer_that_recomputes_selectively_keeps_products(dtype, monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager_decomp_partition")
    module = experts_of("qwen3_moe").to(dtype)
    hidden, chosen, weights = operands()
    layout = Layout(mesh=single(), compile=True, recompute="selective")
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        compiled.economise(module, layout)
        with Counted() as counted:
            output = module(hidden.to(dtype).requires_grad_(), chosen, weights.requires_grad_())
            forward = counted.number
            output.sum().backward()
    assert (forward, counted.number - forward) == (2, 4)
