"""The compiled forward, against the module as it is: mixed steps, updates, other modules beside it, refusals."""

from __future__ import annotations

import collections
import functools

import attrs
import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.exc import InvalidCxxCompiler

from cosmos_core.errors import EngineError
from cosmos_core.protocols import PlannedRun
from cosmos_core.protocols.model import Record
from cosmos_core.rollout.embedded import graphs, packed
from cosmos_core.rollout.embedded.compiled import CompiledForward
from cosmos_core.rollout.embedded.options import EmbeddedOptions, preflight
from tests.unit.models.attention.flash import pages_on_cpus
from tests.unit.rollout.embedded.capture import Rerun

needs_kernels = pytest.mark.skipif(
    not packed._has_kernels(), reason="this CPU has no kernels for packed bfloat16 matrices"
)


@pytest.fixture(autouse=True)
def forgetful():
    yield
    torch._dynamo.reset()


@pytest.fixture
def traced(monkeypatch):
    """Forwards become graphs as ever, which run without being made into kernels: that takes a C++ compiler long."""
    compile_ = torch.compile

    @functools.wraps(compile_)
    def trace(evaluate, *, options, **others):
        filters = {"guard_filter_fn": options["guard_filter_fn"]}
        return compile_(evaluate, backend="aot_eager", options=filters, **others)

    monkeypatch.setattr(torch, "compile", trace)


def num_graphs():
    return counters["stats"]["unique_graphs"]


def generate(kit, engine, name):
    """Prompts in parts, samples of one prompt, and one sequence alone at the end: steps of all kinds."""
    prompts = kit.ragged(5)
    handles = [
        *engine.submit([kit.request(f"{name}-{i}", p, seed=i, max_units=6) for i, p in enumerate(prompts[:4])]),
        *engine.submit([kit.request(f"{name}-group", prompts[4], seed=9, max_units=14, num_samples=2)]),
    ]
    results = [handle.result(60) for handle in handles]
    return [(prompt, each) for prompt, result in zip(prompts, results, strict=True) for each in result]


def test_it_generates_what_the_module_does_over_an_update_with_one_graph(kit, make, traced):
    model = kit.FakeModel(stop_ids=frozenset())
    options = {"max_in_flight": 4, "prefill_units": 16, "cache_step": 8}
    before = num_graphs()
    compiled, plain = make(model, compile=True, **options), make(model, **options)
    module = kit.reference()
    for version in (0, 1):
        if version:
            module = model.build(seed=7, dtype=torch.float32, device=torch.device("cpu"))
            for engine in (compiled, plain):
                kit.load(engine, module, version=version)
        found, expected = (generate(kit, engine, version) for engine in (compiled, plain))
        for (prompt, one), (_, other) in zip(found, expected, strict=True):
            assert kit.completion(one) == kit.completion(other)
            own = kit.plain_logprobs(module, prompt, kit.completion(one))
            np.testing.assert_allclose(kit.logprobs(one), own, atol=2e-5, rtol=0)
    assert num_graphs() == before + 1


def test_graphs_of_decode_steps_run_the_compiled_forward(kit, make, traced, monkeypatch):
    """Also that of one sequence, whose unit it is fed twice."""
    monkeypatch.setattr(Rerun, "counts", collections.Counter())
    monkeypatch.setitem(graphs.CAPTURES, "cpu", Rerun)
    before = num_graphs()
    with pages_on_cpus(8):
        engine = make(kit.FakeModel(stop_ids=frozenset()), max_in_flight=4, compile=True)
        for prompt, found in generate(kit, engine, "paged"):
            own = kit.plain_logprobs(kit.reference(), prompt, kit.completion(found))
            np.testing.assert_allclose(kit.logprobs(found), own, atol=2e-5, rtol=0)
    assert Rerun.counts["replays"] > 5
    assert num_graphs() == before + 1


def test_without_a_compiler_it_is_refused_and_says_what_to_do(monkeypatch, tmp_path):
    def absent(*_):
        raise InvalidCxxCompiler

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", absent)
    compiled = CompiledForward(lambda tokens, positions, kept: (tokens + positions).sin()[kept], "Qwen3ForCausalLM")
    with pytest.raises(EngineError, match=r"options\.compile: the forward of Qwen3ForCausalLM.*set compile = false"):
        compiled.compile(torch.arange(5), torch.arange(5))


def test_it_is_refused_when_planned_where_it_cannot_be_had(kit, make):
    model = kit.FakeModel()
    planned = PlannedRun(
        model=model,
        facts=model.facts(),
        device="cpu",
        has_gpu=False,
        precision="float32",
        temperatures={},
        shows_media=False,
    )
    compiles = EmbeddedOptions(compile=True)
    (problem,) = preflight(compiles, planned).problems
    assert "not all layers of Qwen3Config are known to attend through it" in problem
    planned = attrs.evolve(planned, facts=attrs.evolve(planned.facts, attends_pluggably=True))
    assert preflight(compiles, planned).problems == ()
    for device, has_gpu, share in [("cpu", True, 0.25), ("auto", False, 0.25), ("auto", True, 0), ("cuda", False, 0)]:
        there = attrs.evolve(planned, device=device, has_gpu=has_gpu)
        told = preflight(EmbeddedOptions(prefix_cache=0.25, cache_gib=0.5), there)
        assert (told.kept_share, told.cache_bytes) == (share, 0 if device == "cpu" else 2**29)
    model.records = lambda: [Record(name="experts", dtype="int32", shape=(2, 1), option="model.options.replay")]
    model.record = lambda module: dict
    model.counters, model.after_step = lambda module: (), lambda module: {}
    (problem,) = preflight(compiles, planned).problems
    assert "records its forwards (experts)" in problem
    with pytest.raises(EngineError, match="records its forwards"):
        make(model, compile=True)
