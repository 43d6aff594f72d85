"""Training in 8 bits: near to full precision, and the same in any layout."""

from __future__ import annotations

import functools

import pytest
import torch

from cosmos_core.config.schema import Float8Config, MeshConfig, ParallelConfig, PolicyConfig
from cosmos_core.errors import ConfigError
from cosmos_core.testing.layouts import step_alone, steps_in_layouts
from tests.families import CONFIGS, family, text_payloads

# As models start: with larger weights a tiny one's loss moves by more than what rounding does to a real one.
MODELS = {name: {**CONFIGS[name], "initializer_range": 0.02} for name in ("llama", "qwen3-tied", "qwen3-moe")}


def policy(scaling="none", skip=("lm_head",), parallel=None, **mesh):
    return PolicyConfig(
        precision="fp32",
        micro_batch_units=64,
        mesh=MeshConfig(**mesh),
        parallel=ParallelConfig(**{"compile": "off", **(parallel or {})}),
        float8=Float8Config(scaling=scaling, skip=skip),
    )


@functools.cache
def alone(name, scaling="none", skip=("lm_head",)):
    return step_alone(family("hf", MODELS[name]), text_payloads(), policy(scaling, skip))


def cosine(one, other):
    flat = [
        torch.cat([each.gradients[name].flatten().double() for name in sorted(each.gradients)]) for each in (one, other)
    ]
    assert all(each.isfinite().all() for each in flat)
    return float(torch.nn.functional.cosine_similarity(*flat, dim=0))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_near_full_precision(name, scaling):
    exact, found = alone(name), alone(name, scaling)
    assert 0 < abs(found.loss - exact.loss) <= 5e-4 * exact.loss
    assert 0.99 < cosine(found, exact) < 0.99999


@pytest.mark.parametrize(("name", "scaling"), [("llama", "tensorwise"), ("qwen3-tied", "rowwise")])
def test_the_same_in_layouts(name, scaling):
    layouts = {
        "fsdp": policy(scaling, dp_shard=2),
        "tp": policy(scaling, tp=2),
        "tp, no sequence parallel": policy(scaling, tp=2, parallel={"sequence_parallel": False}),
        "pp": policy(scaling, pp=2),
        "tp, recomputed": policy(scaling, tp=2, parallel={"recompute": "selective"}),
    }
    expected = alone(name, scaling)
    found = steps_in_layouts(family("hf", MODELS[name]), text_payloads(), list(layouts.values()), processes=2)
    for label, stepped in zip(layouts, found, strict=True):
        assert abs(stepped.loss - expected.loss) <= 3e-4 * expected.loss, (label, stepped.loss, expected.loss)
        assert cosine(stepped, expected) > 0.99, label


@pytest.mark.parametrize(("name", "scaling"), [("llama", "rowwise"), ("qwen3-tied", "tensorwise")])
def test_the_output_layer_has_one_scale_over_all_parts_of_the_vocabulary(name, scaling):
    """Rounding is all that a layout may change, and of one layer that is little."""
    skip = ("layers",)
    expected = alone(name, scaling, skip)
    (found,) = steps_in_layouts(family("hf", MODELS[name]), text_payloads(), [policy(scaling, skip, tp=2)], processes=2)
    assert expected.loss != alone(name).loss
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert cosine(found, expected) > 0.999999


def test_what_is_skipped_keeps_its_precision():
    linear = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "lm_head")
    exact = alone("llama")
    one_layer = alone("llama", "rowwise", (*linear, "layers.0", "layers.1", "layers.2"))
    four_layers = alone("llama", "rowwise", linear)
    assert exact.loss != one_layer.loss != four_layers.loss
    assert 0.9999 < cosine(one_layer, exact) < 0.99999999
    assert cosine(four_layers, exact) < cosine(one_layer, exact)


def test_nothing_left_to_compute_in_8_bits_is_refused():
    with pytest.raises(ConfigError, match=r"policy\.float8\.skip: \['layers', 'lm_head'\] leaves none of the 29"):
        alone("llama", "rowwise", ("layers", "lm_head"))
