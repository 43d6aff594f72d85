"""Faults of families of world models that their kit must name, and what it compares layouts by."""

import math
from types import SimpleNamespace

import attrs
import pytest
import torch

from cosmos_core.errors import DataError
from cosmos_core.protocols import ModelCapabilities
from cosmos_core.testing import DenoisingModelConformance
from cosmos_core.testing.conformance.model import kit
from cosmos_core.testing.layouts import Stepped
from cosmos_core.testing.worlds import WorldFailedError
from cosmos_core.types import Prompt

ALONE = Stepped(weights={}, loss=2.0, norm=1.0, gradients={"w": torch.tensor([3.0, 4.0]).double()}, metrics={})
NEARLY = torch.tensor([3.0, 4.0 + 15e-6], dtype=torch.float64)
"""Off by 3e-6 of the norm: what rounding of float32 may do, and that of float64 may not."""


def step_of(policy):
    """What a step comes to: with adapters, these alone have gradients."""
    return ALONE if policy.lora is None else attrs.evolve(ALONE, gradients={"w.lora_A": torch.ones(1)})


class Kit(DenoisingModelConformance):
    plugin = "any"


@pytest.fixture
def compare(monkeypatch):
    """Run a test of layouts on what steps came to; `axes` are those that are declared."""
    monkeypatch.setattr(kit, "step_alone", lambda make, batch, policy, dtype: step_of(policy))

    def run(test, axes):
        subject = SimpleNamespace(
            capabilities=ModelCapabilities(mesh_axes=frozenset(axes)),
            facts=SimpleNamespace(impossible={}),
            maker=None,
            payloads=[None],
            alone=[SimpleNamespace(num_units=3)],
        )
        test(Kit(), subject)

    return run


def steps(monkeypatch, make):
    """Let a step come to `make(dtype, layout)`, and remember the layouts."""
    seen = []

    def steps_in_layouts(maker, batch, policies, *, processes, dtypes):
        seen.extend(policies)
        return [make(dtype, policy) for policy, dtype in zip(policies, dtypes, strict=True)]

    monkeypatch.setattr(kit, "steps_in_layouts", steps_in_layouts)
    return seen


TOGETHER = Kit.test_axes_together_equal_one_process


def test_what_is_declared_is_spread_together(compare, monkeypatch):
    seen = steps(monkeypatch, lambda dtype, policy: step_of(policy))
    compare(TOGETHER, {"dp_replicate", "dp_shard", "cp"})
    assert len(seen) == 5 + 1  # float32 in one of them
    assert {policy.lora is None for policy in seen} == {True, False}
    seen.clear()
    compare(TOGETHER, {"dp_shard"})
    assert [policy.mesh.dp_shard for policy in seen] == [4, 4]
    with pytest.raises(pytest.skip.Exception, match="not declared"):
        compare(TOGETHER, {"cp"})


def named(compare, test, axes):
    """The fault that a test names."""
    with pytest.raises(pytest.fail.Exception) as caught:
        compare(test, axes)
    return str(caught.value)


def failing(message):
    def fail(*_, **__):
        raise WorldFailedError(message)

    return fail


def test_a_step_that_comes_to_something_else_is_named(compare, monkeypatch):
    for changes, message in (
        ({"loss": 2.0 + 4e-6}, "with dp_shard = 4 in torch.float64 the loss is 2.000004, in one process 2"),
        ({"weights": {"w": NEARLY}}, "with dp_shard = 4 build() makes other weights: w"),
        ({"loss": math.nan}, "the loss is nan"),
        ({"gradients": {"w": NEARLY}}, "in torch.float64 the gradient of w differs from one process's by 3e-06"),
        ({"gradients": {}}, "the gradient of w differs from one process's by inf"),
    ):
        changed = attrs.evolve(ALONE, **changes)
        steps(monkeypatch, lambda dtype, policy, changed=changed: changed)
        assert message in named(compare, TOGETHER, {"dp_shard"})
    # Rounding of float32 is no fault.
    rounded = attrs.evolve(ALONE, gradients={"w": NEARLY})
    steps(monkeypatch, lambda dtype, policy: rounded if dtype == torch.float32 else ALONE)
    compare(TOGETHER, {"dp_shard"})
    learning = attrs.evolve(ALONE, gradients={"w.lora_A": torch.ones(1), "w": torch.ones(1)})
    monkeypatch.setattr(kit, "step_alone", lambda *_, **__: learning)
    steps(monkeypatch, lambda dtype, policy: learning)
    message = "adapters w has a gradient, and is no adapter"
    assert message in named(compare, TOGETHER, {"dp_shard", "cp"})


def test_what_fails_is_named(compare, monkeypatch):
    where = "a step alone, or on 4 processes with dp_shard = 4, with dp_shard = 4, failed:"
    monkeypatch.setattr(kit, "steps_in_layouts", failing("rank 1 of 4 failed"))
    assert named(compare, TOGETHER, {"dp_shard"}) == f"{where}\nrank 1 of 4 failed"
    monkeypatch.setattr(kit, "step_alone", failing("no double"))
    assert named(compare, TOGETHER, {"dp_shard"}) == f"{where}\nno double"


def reading(prompt):
    if prompt.demonstration != "film.npy":
        raise DataError("no film")


def refusing(prompt):
    raise DataError("too short")


def passing(prompt):
    pass


def test_a_model_that_vets_wrongly_is_named(tmp_path):
    rows, vetted = [Prompt(text="red", demonstration="film.npy")], Kit().test_a_demonstration_can_be_vetted
    for vet, encode, message in (
        (passing, reading, "passing() passes a row whose demonstration is no file"),
        (reading, passing, "passing() passes a row whose demonstration is no file"),
        (refusing, reading, "refuses the row 'red', which can be encoded"),
    ):
        model = SimpleNamespace(vet=vet, encode_demonstration=encode, options=SimpleNamespace(num_frames=1))
        with pytest.raises(pytest.fail.Exception) as caught:
            vetted(model, rows, tmp_path)
        assert message in str(caught.value)


def test_a_family_says_what_its_library_computes():
    with pytest.raises(pytest.fail.Exception, match="override forward"):
        Kit().forward(None, None, None, None)
    with pytest.raises(pytest.fail.Exception, match="override guided"):
        Kit().guided(None, None, 2.0)
