"""The generic vision-language model in layouts, with images in some rows: the loss and gradients of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosmos_core.config.schema import MeshConfig, ParallelConfig, PolicyConfig
from cosmos_core.protocols import ModelContext
from cosmos_core.testing.layouts import PluginModel, step_alone, steps_in_layouts, worst_error
from cosmos_core.testing.worlds import WorldFailedError
from tests.vision import checkpoint, prompts

BUDGET = 240


def policy(parallel=None, **mesh):
    return PolicyConfig(
        precision="fp32",
        micro_batch_units=BUDGET,
        mesh=MeshConfig(**mesh),
        parallel=ParallelConfig(**(parallel or {})),
    )


TWO = {
    "fsdp": policy(dp_shard=2),
    "tp": policy(tp=2),
    "tp, no sequence parallel": policy(tp=2, parallel={"sequence_parallel": False}),
    "cp": policy(cp=2),
    "pp": policy(pp=2),
}
FOUR = {"cp tp, recomputed": policy(cp=2, tp=2, parallel={"recompute": "full"}), "pp fsdp": policy(pp=2, dp_shard=2)}


def generic(folder):
    context = ModelContext(path=str(folder), config=None, assets=Path(folder) / "none")
    return PluginModel(plugin="hf", context=context)


@pytest.fixture
def make(tmp_path, name):
    return generic(checkpoint(tmp_path / name, name))


def real(stepped, expected):
    """Gradients that are not zero but for rounding, as that of a key's bias is: softmax does not feel it."""
    return {
        name: tensor
        for name, tensor in stepped.gradients.items()
        if expected.gradients[name].norm() > 1e-7 * expected.norm
    }


def compare(make, layouts, processes):
    model = make()
    # The last rows show nothing: of some micro-batches some processes see no image.
    payloads = [model.encode_demonstration(prompt) for prompt in (*prompts(), prompts()[0], prompts()[4])]
    expected = step_alone(make, payloads, policy())
    found = steps_in_layouts(make, payloads, list(layouts.values()), processes=processes)
    for label, stepped in zip(layouts, found, strict=True):
        assert abs(stepped.loss - expected.loss) <= 1e-6 * abs(expected.loss), (label, stepped.loss, expected.loss)
        assert stepped.gradients.keys() == expected.gradients.keys()
        worst, error = worst_error(real(stepped, expected), real(expected, expected))
        assert error <= 1e-5, (label, worst, error)


@pytest.mark.parametrize("name", ["llava_next", "idefics3", "qwen3_vl"])
def test_two_processes(make):
    compare(make, TWO, 2)


@pytest.mark.parametrize("name", ["qwen3_vl"])
def test_four_processes(make):
    compare(make, FOUR, 4)


@pytest.mark.parametrize("name", ["qwen3_vl"])
def test_stages_with_too_few_layers_for_what_is_seen_are_refused(tmp_path, name):
    make = generic(checkpoint(tmp_path / "deep", name, num_hidden_layers=2))
    payloads = [make().encode_demonstration(prompt) for prompt in prompts()]
    with pytest.raises(WorldFailedError, match="adds to the results of its first layers"):
        steps_in_layouts(make, payloads, [policy(pp=2, tp=2)], processes=4)
