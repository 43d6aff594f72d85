"""Every layout against one process, with images and videos in some rows: the same loss, norm and gradients."""

import pytest
import torch

from cosmos_core.config.schema import MeshConfig, ParallelConfig, PolicyConfig
from cosmos_core.policy.mesh.layout import layout_of
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.protocols import ModelContext
from cosmos_core.testing.layouts import PluginModel, step_alone, steps_in_layouts, worst_error
from cosmos_core.testing.worlds import WorldFailedError
from cosmos_core.types import Prompt
from cosmos_model_qwen_vl.tiny import CONFIGS, OPTIONS, TOKENIZER, data_url, film, picture

pytestmark = pytest.mark.nightly


def policy(parallel=None, **mesh):
    return PolicyConfig(
        precision="fp32",
        micro_batch_units=96,
        mesh=MeshConfig(**mesh),
        parallel=ParallelConfig(**(parallel or {})),
    )


TWO = {
    "fsdp": policy(dp_shard=2),
    "tp": policy(tp=2),
    "tp, no sequence parallel": policy(tp=2, parallel={"sequence_parallel": False}),
    "cp": policy(cp=2),
    "cp by gathering, recomputed": policy(cp=2, parallel={"context": "gather", "recompute": "full"}),
    "pp": policy(pp=2),
}
FOUR = {
    "fsdp tp": policy(dp_shard=2, tp=2),
    "cp tp": policy(cp=2, tp=2),
    "pp fsdp": policy(pp=2, dp_shard=2),
}

EIGHT = {
    "fsdp cp tp": policy(dp_shard=2, cp=2, tp=2),
    # Of three layers the first stage has two, which qwen3_vl adds what it sees to.
    "pp cp tp, recomputed": policy(pp=2, cp=2, tp=2, parallel={"recompute": "full", "sequence_parallel": False}),
}


@pytest.fixture
def make(name, tmp_path):
    context = ModelContext(path=None, config=CONFIGS[name], assets=tmp_path / "assets")
    make = PluginModel(plugin="qwen-vl", options=OPTIONS, context=context)
    make().prepare(["Which colour? red, blue and 12 or 34 at 0.5 seconds"], TOKENIZER)
    return make


@pytest.fixture
def payloads(make, tmp_path):
    images = [data_url(picture(width, height, seed)) for seed, (width, height) in enumerate(((40, 24), (16, 16)))]
    video = film(tmp_path / "film", 5, 24, 16)
    prompts = [
        Prompt(text="How many are there, and of which colours?", demonstration="twelve, or 13"),
        Prompt(text="Which colour?", demonstration="red", media=(images[0],)),
        Prompt(text="<image> is not <image>, is it", demonstration="blue", media=tuple(images)),
        Prompt(text="<video>, <image>: then?", demonstration="none", media=(video, images[1])),
        Prompt(text="And words alone?", demonstration="yes"),
        Prompt(text="No, nothing to see in this one", demonstration="at all"),
    ]
    model = make()
    return [model.encode_demonstration(prompt) for prompt in prompts]


def compare(make, payloads, layouts, processes):
    expected = step_alone(make, payloads, policy())
    found = steps_in_layouts(make, payloads, list(layouts.values()), processes=processes)
    for label, stepped in zip(layouts, found, strict=True):
        assert abs(stepped.loss - expected.loss) <= 1e-6 * abs(expected.loss), (label, stepped.loss, expected.loss)
        worst, error = worst_error(stepped.gradients, expected.gradients)
        assert error <= 1e-5, (label, worst, error)


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize(("layouts", "processes"), [(TWO, 2), (FOUR, 4), (EIGHT, 8)], ids=["two", "four", "eight"])
def test_layouts(make, payloads, layouts, processes):
    compare(make, payloads, layouts, processes)


@pytest.mark.parametrize("name", ["qwen3_vl"])
def test_stages_with_too_few_layers_for_what_is_seen_are_refused(make, payloads):
    with pytest.raises(WorldFailedError, match=r"needs 2 layers, and of 3 it has 1; there can be at most 2"):
        steps_in_layouts(make, payloads, [policy(pp=3)], processes=3)


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize(("recompute", "runs"), [("none", 1), ("full", 2)])
def test_the_tower_is_recomputed_like_the_text(make, payloads, recompute, runs):
    model, chosen = make(), policy(parallel={"recompute": recompute})
    layout = layout_of(chosen, form_mesh(chosen.mesh, "cpu"), "cpu")
    module = model.build(seed=0, dtype=torch.float32, device=torch.device("cpu"), layout=layout)
    calls = []
    module.model.visual.blocks[0].attn.register_forward_hook(lambda *_: calls.append(1))
    (batch,) = model.pack(payloads, budget=1024)
    model.decide(module, batch, temperature=1.0).logprobs_N.sum().backward()
    assert len(calls) == runs
