from __future__ import annotations

import shutil

import attrs
import pytest
import torch

from cosmos_core.testing import EngineConformance
from cosmos_core.testing.ranks import forked_ranks


class TestEmbedded(EngineConformance):
    plugin = "embedded"


class TestEmbeddedInSmallSteps(EngineConformance):
    """Prompts enter in several parts, and the cache grows and shrinks all the time."""

    plugin = "embedded"

    @pytest.fixture
    def options(self):
        return {"prefill_units": 7, "cache_step": 8}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="kernels are compiled with g++, which this machine lacks")
class TestEmbeddedCompiled(EngineConformance):
    """Its forward is one graph, in kernels of the machine's own compiler; compiled once, for all tests."""

    plugin = "embedded"

    @pytest.fixture
    def options(self):
        return {"compile": True}

    @pytest.fixture
    def capabilities(self, provider):
        """Compiled forwards record nothing: `options.compile` refuses it, so that there is nothing to show of it."""
        return attrs.evolve(provider.capabilities, records=False)

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def compiled_once(cls, tmp_path_factory):
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
            yield
        torch._dynamo.reset()


@pytest.mark.slow
class TestEmbeddedOnTwoRanks(EngineConformance):
    """The model is split over two processes."""

    plugin = "embedded"
    tensor_parallel = 2

    @pytest.fixture
    def options(self):
        return {"prefill_units": 40, "cache_step": 8}

    @pytest.fixture(autouse=True)
    def ranks(self):
        with forked_ranks():
            yield
