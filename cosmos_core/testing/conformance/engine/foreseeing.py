"""What an engine says of a run before any process starts (`Provider.foresee`)."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from cosmos_core.config.structure import structure
from cosmos_core.protocols import EngineContext, EngineOutlook, Foresight, Provider, RolloutEngine
from cosmos_core.testing.conformance.engine.setting import EngineSetting
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import JSON, Payload
from cosmos_core.weights.shards import dtype_name


class ForeseeingTests(EngineSetting):
    """Planning asks it, with what the recipe says."""

    @pytest.fixture
    def outlook(self, context: EngineContext, prompts: list[Payload]) -> EngineOutlook:
        """A run such as these tests generate for."""
        has_gpu = context.device.type == "cuda"
        return EngineOutlook(
            model=context.model,
            facts=context.model.facts(),
            device="cuda" if has_gpu else "cpu",
            has_gpu=has_gpu,
            precision=dtype_name(context.dtype),
            temperatures={"rollout.sampling.temperature": 1.0},
            shows_media=False,
            num_ranks=self.tensor_parallel,
            samplings={"rollout.sampling": self.request("one", prompts[0]).sampling},
        )

    def test_it_foresees_nothing_against_what_it_does_here(
        self, provider: Provider[RolloutEngine], options: dict[str, JSON], outlook: EngineOutlook
    ) -> None:
        """What generates in these tests is no run to refuse, at whatever temperature it is drawn."""
        if provider.foresee is None:
            pytest.skip("not declared: it foresees nothing (`Provider.foresee`)")
        given: Any = structure(options, provider.options, "engine.options")
        drawn = [each for each in (0.7, 1.0) if self.draws_at(each)]
        for temperatures in ({"rollout.sampling.temperature": 1.0}, {"one": 0.0, "other": drawn[0]}):
            asked = attrs.evolve(outlook, temperatures=temperatures)
            told, again = (provider.foresee(given, asked) for _ in range(2))
            if not isinstance(told, Foresight):
                fault(f"foresee() returned {told!r}; return a Foresight")
            if told != again:
                fault(f"foresee() said {told}, and of the same run {again}; it must depend on what it is given alone")
            if said := [*told.problems, *([told.absent] if told.absent else [])]:
                fault(f"foresee() refuses a run such as these tests generate for: {said[0]}")
