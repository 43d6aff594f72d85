"""Faults of models on many processes that the kit must name: of padding, of counts, of each axis."""

import pytest

from tests.nightly.kit.faulty_family import (
    LAYOUT_TESTS,
    OWN_BUILD,
    TESTS,
    TINY,
    axes,
    build,
    family,
    logprobs,
    only,
    pack,
    unnamed,
)

pytestmark = pytest.mark.slow


PADDING = {
    "multiple-ignored": (
        family(
            "def pack(self, payloads, *, budget, **padding): return super().pack(payloads, budget=budget)", axes("cp")
        ),
        "test_declared_mesh_axes_equal_one_process",
        "on 2 processes with cp = 2, failed",
    ),
    "not-uniform": (
        family(
            """
            def pack(self, payloads, *, budget, multiple=1, **padding):
                return super().pack(payloads, budget=budget, multiple=multiple)
            """,
            axes("pp"),
        ),
        "test_declared_mesh_axes_equal_one_process",
        "on 2 processes with pp = 2, failed",
    ),
    "padding-decides": (
        pack(
            "[attrs.evolve(b, num_decisions=(*b.num_decisions[:-1], b.num_decisions[-1] + 1)) for b in batches] "
            "if multiple > 1 else batches",
            axes("tp"),
        ),
        "test_declared_mesh_axes_equal_one_process",
        "on 2 processes with tp = 2, failed",
    ),
    "padding-is-seen": (
        pack(
            "[attrs.evolve(b, inputs={**b.inputs, 'lengths': b.inputs['lengths'].sum()[None]}) for b in batches] "
            "if multiple > 1 else batches",
            axes("tp"),
        ),
        "test_declared_mesh_axes_equal_one_process",
        "with tp = 2 in torch.float32 the loss is",
    ),
}
COUNTING = """
    def build(self, *, seed, dtype, device, layout=None):
        module = super().build(seed=seed, dtype=dtype, device=device, layout=layout)
        self.counter = torch.zeros(1)
        return module

    def decide(self, module, batch, *, temperature, with_entropy=False):
        if {condition}:
            self.counter += batch.num_units
        return super().decide(module, batch, temperature=temperature, with_entropy=with_entropy)

    def counters(self, module):
        return [{counter}]

    def after_step(self, module):
        {act}
        return {{"units_seen": {metric}}}

    def records(self):
        return ()

    def record(self, module):
        raise AssertionError
"""


def counting(condition="batch.weights_N is not None", counter="self.counter", act="pass", metric="float(self.counter)"):
    """A model that counts, somehow."""
    return family(COUNTING.format(condition=condition, counter=counter, act=act, metric=metric), axes("dp_shard"))


COUNTERS = {
    "counts-copied": (
        counting(counter="self.counter.clone()"),
        "test_only_forwards_of_a_step_are_counted",
        "after counters() were zeroed; give the tensors, never copies",
    ),
    "always-counting": (
        counting(condition="True"),
        "test_only_forwards_of_a_step_are_counted",
        "a forward without weights_N is counted",
    ),
    "counted-in-integers": (
        counting(counter="self.counter.long()"),
        "test_only_forwards_of_a_step_are_counted",
        "one of counters() is torch.int64",
    ),
    "acting-on-weights": (
        counting(act="module.model.norm.weight.data.mul_(1.01)"),
        "test_only_forwards_of_a_step_are_counted",
        "after_step() changed model.norm.weight, which has a gradient",
    ),
    "reporting-nothing": (
        counting(metric="float('nan')"),
        "test_only_forwards_of_a_step_are_counted",
        "after_step() reports {'units_seen': nan}",
    ),
}
LAYOUTS = {
    "unknown-axis": (
        family(after=axes("zp")),
        "test_declared_mesh_axes_equal_one_process",
        'ModelCapabilities.mesh_axes.0: expected one of "pp", "dp_replicate"',
    ),
    "gradient-not-summed": (
        build(
            "if layout is not None and layout.mesh.size('tp') > 1:",
            "    from cosmos_core.models.parallel import tensor",
            "    tensor.copy_to_group = lambda weight, group: weight",
            OWN_BUILD,
            after=axes("tp"),
        ),
        "test_declared_mesh_axes_equal_one_process",
        "with tp = 2 in torch.float32 the gradient of model",
    ),
    "gradient-summed-twice": (
        logprobs("2 * own - own.detach() if torch.distributed.is_initialized() else own", after=axes("dp_shard")),
        "test_declared_mesh_axes_equal_one_process",
        "with dp_shard = 2 in torch.float32 the gradient of",
    ),
    "loss-scaled": (
        logprobs("own / 2 if torch.distributed.is_initialized() else own", after=axes("dp_replicate")),
        "test_declared_mesh_axes_equal_one_process",
        "with dp_replicate = 2 in torch.float32 the loss is",
    ),
    "other-counts": (
        counting(metric="float(self.counter) + torch.distributed.is_initialized()"),
        "test_declared_mesh_axes_equal_one_process",
        "with dp_shard = 2 in torch.float32 the units_seen is",
    ),
    # Were the loss linear in log-probs, its gradient would be none the worse.
    "gradients-mixed-up": (
        logprobs(
            "own.detach() + (own - own.detach()).flip(0) if torch.distributed.is_initialized() else own",
            after=axes("cp"),
        ),
        "test_declared_mesh_axes_equal_one_process",
        "with cp = 2 in torch.float32 the gradient of",
    ),
    "own-decisions-only": (
        logprobs("own[: len(own) // 2] if torch.distributed.is_initialized() else own", after=axes("cp")),
        "test_declared_mesh_axes_equal_one_process",
        "on 2 processes with cp = 2, failed",
    ),
    "other-things-said": (
        logprobs("own + torch.distributed.get_rank() if torch.distributed.is_initialized() else own", after=axes("tp")),
        "test_declared_mesh_axes_equal_one_process",
        "with tp = 2 in torch.float32 the gradient of",
    ),
    "other-weights": (
        build(
            OWN_BUILD,
            "if layout is not None and layout.mesh.size('tp') > 1: module.model.norm.weight.data.mul_(2)",
            after=axes("tp"),
        ),
        "test_declared_mesh_axes_equal_one_process",
        "with tp = 2 build() makes other weights: model.norm.weight",
    ),
    "no-stages": (
        family("stages = conclude = None", axes("pp")),
        "test_declared_mesh_axes_equal_one_process",
        "on 2 processes with pp = 2, failed",
    ),
}
PLANTED = {**PADDING, **COUNTERS, **LAYOUTS}
GOOD = {"every-axis": family(after=axes("tp", "cp", "pp", "dp_shard", "dp_replicate")), "counting": counting()}
TWO_LAYERS = "config = {**TINY, 'num_hidden_layers': 2}\n"


@pytest.fixture(scope="module")
def outcomes(run_kit):
    modules = {**GOOD, **{name: source for name, (source, *_) in PLANTED.items()}}
    others = "".join(f"{name} = None\n" for name in TESTS if name not in LAYOUT_TESTS)
    bodies = {name: only(test) for name, (_, test, _) in PLANTED.items()} | dict.fromkeys(GOOD, others)
    return run_kit("model", modules, header=TINY, body=TWO_LAYERS, bodies=bodies)


def test_a_good_model_passes_on_every_axis(outcomes):
    assert {each.test for each in outcomes["every-axis"] if each.result == "failed"} == set()
    passed = {each.test for name in GOOD for each in outcomes[name] if each.result == "passed"}
    assert passed == LAYOUT_TESTS


def test_a_good_model_that_counts_passes(outcomes):
    assert {each.test: each.message for each in outcomes["counting"] if each.result == "failed"} == {}


def test_every_fault_is_named(outcomes):
    assert unnamed(outcomes, PLANTED) == {}


def test_every_test_of_many_processes_can_fail():
    planted = {test for _, test, _ in PLANTED.values()}
    assert planted == LAYOUT_TESTS
