"""Every layout against one process, with guidance and both kinds of decisions: the same loss and gradients."""

import pytest
import torch

from cosmos_core.config.schema import LoraConfig, MeshConfig, ParallelConfig, PolicyConfig
from cosmos_core.policy.mesh.layout import layout_of
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.policy.modeling.diffusion import payload_of
from cosmos_core.policy.processes.world import World
from cosmos_core.protocols import ModelContext
from cosmos_core.testing.layouts import PluginModel, step_alone, steps_in_layouts, whole, worst_error
from cosmos_core.testing.worlds import run_world
from cosmos_core.types import Prompt
from cosmos_model_wan.tiny import CONFIG, OPTIONS


def policy(parallel=None, lora=None, **mesh):
    return PolicyConfig(
        precision="fp32",
        micro_batch_units=3,
        mesh=MeshConfig(**mesh),
        parallel=ParallelConfig(**(parallel or {})),
        lora=lora,
    )


LORA = LoraConfig(rank=2, alpha=4.0)
LAYOUTS = {
    "fsdp": policy(dp_shard=4),
    "hsdp, recomputed in part": policy(dp_replicate=2, dp_shard=2, parallel={"recompute": "selective"}),
    "fsdp cp": policy(dp_shard=2, cp=2),
    "cp of two replicas, recomputed": policy(dp_replicate=2, cp=2, parallel={"recompute": "full"}),
    "adapters": policy(dp_shard=2, cp=2, lora=LORA),
}


@pytest.fixture
def maker(tmp_path):
    return PluginModel(
        plugin="wan",
        options={**OPTIONS, "negative_prompt": "grey"},
        context=ModelContext(path=None, config=CONFIG, assets=tmp_path / "assets"),
    )


@pytest.fixture
def payloads(maker):
    """Transitions under guidance, and regressions."""
    model, drawn = maker(), torch.Generator().manual_seed(0)
    found = []
    for index, words in enumerate(("red", "blue", "green light", "yellow", "black")):
        payload = model.encode(Prompt(text=words))
        shape = model.canvas(payload).shape
        text = {"text": model.conditioning(payload)["text"]}
        if index % 2:
            sample = torch.randn(shape, generator=drawn)
            found.append(model.noised(payload_of({**text, "sample": sample}), index, num_decisions=2 + index))
            continue
        states = torch.randn((3, *shape), generator=drawn)
        transitions = {
            "states": states,
            "places": torch.tensor([[0, 1], [1, 2]], dtype=torch.int32),
            "times": torch.tensor([0.9, 0.4]),
            "steps": torch.tensor([[0.9, -0.3, 0.5], [0.8, -0.2, 0.7]]),
            "guidance": torch.tensor(2.5),
        }
        found.append(payload_of({**text, **transitions}))
    return found


def test_layouts(maker, payloads):
    expected = {lora: step_alone(maker, payloads, policy(lora=lora)) for lora in (None, LORA)}
    assert all("lora" in name for name in expected[LORA].gradients)
    found = steps_in_layouts(maker, payloads, list(LAYOUTS.values()), processes=4)
    for (label, layout), stepped in zip(LAYOUTS.items(), found, strict=True):
        alone = expected[layout.lora]
        assert abs(stepped.loss - alone.loss) <= 1e-6 * abs(alone.loss), (label, stepped.loss, alone.loss)
        worst, error = worst_error(stepped.gradients, alone.gradients)
        assert error <= 1e-5, (label, worst, error)


def ratios(maker, payloads, layout):
    """Log-probs and gradients of a loss that is not linear in them, as a clipped ratio's is not."""
    model, world = maker(), World(form_mesh(layout.mesh, "cpu"))
    module = model.build(
        seed=0, dtype=torch.float32, device=torch.device("cpu"), layout=layout_of(layout, world.mesh, "cpu")
    )
    found = []
    for batch in model.pack(payloads, budget=4):
        decided = model.decide(module, batch, temperature=1.0, with_entropy=True)
        old_N = decided.logprobs_N.detach() + torch.linspace(-0.3, 0.4, len(decided.logprobs_N))
        ratio_N = (decided.logprobs_N - old_N).exp()
        torch.maximum(-ratio_N, -ratio_N.clamp(0.9, 1.1)).sum().backward()
        found += [decided.logprobs_N.detach(), decided.entropy_N]
    gradients = {name: each.grad for name, each in module.named_parameters()}
    return torch.cat(found), whole(gradients, world)


def test_ratios_over_slices_are_those_of_one_process(maker, payloads):
    expected, gradients = ratios(maker, payloads, policy())
    for found, slices in run_world(2, ratios, maker, payloads, policy(cp=2)):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        worst, error = worst_error(slices, gradients)
        assert error <= 1e-5, (worst, error)
