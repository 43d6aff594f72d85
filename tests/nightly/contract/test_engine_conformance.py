from __future__ import annotations

import functools

import attrs
import pytest
import torch

from cosmos_core.testing import EngineConformance


class TestEmbedded(EngineConformance):
    plugin = "embedded"


class TestEmbeddedInSmallSteps(EngineConformance):
    """Prompts enter in several parts, and the cache grows and shrinks all the time."""

    plugin = "embedded"

    @pytest.fixture
    def options(self):
        return {"prefill_units": 7, "cache_step": 8}


@pytest.mark.sweep
class TestEmbeddedCompiled(EngineConformance):
    """Its forward is one graph, traced and run without being made into kernels, which takes a C++ compiler long."""

    plugin = "embedded"

    @pytest.fixture
    def options(self):
        return {"compile": True}

    @pytest.fixture
    def capabilities(self, provider):
        """Compiled forwards record nothing: `options.compile` refuses it, so that there is nothing to show of it."""
        return attrs.evolve(provider.capabilities, records=False)

    @pytest.fixture(autouse=True)
    def traced(self, monkeypatch):
        compile_ = torch.compile

        @functools.wraps(compile_)
        def trace(evaluate, *, options, **others):
            filters = {"guard_filter_fn": options["guard_filter_fn"]}
            return compile_(evaluate, backend="aot_eager", options=filters, **others)

        monkeypatch.setattr(torch, "compile", trace)

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def forgetful(cls):
        yield
        torch._dynamo.reset()
