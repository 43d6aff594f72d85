"""The reward under test: what is scored, in a worker or here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import attrs
import pytest

from cosmos_core.config.schema import RewardConfig
from cosmos_core.protocols import Completion, Kind, Loading, Reward, RewardCapabilities, RewardContext
from cosmos_core.testing.conformance.plugin import PluginConformance, fault
from cosmos_core.testing.conformance.reward.completions import ordinary_completions, shown
from cosmos_core.testing.conformance.reward.pictures import ordinary_pictures
from cosmos_core.testing.conformance.reward.scoring import Judged, judge
from cosmos_core.testing.conformance.reward.workers import WorkerRun, score_in_worker
from cosmos_core.types import JSON


class ScoreInWorker(Protocol):
    """Scores completions in a worker process."""

    def __call__(self, completions: Sequence[Completion], *, hash_seed: str = "0") -> WorkerRun:
        """Score them in a worker with this `PYTHONHASHSEED`."""
        ...


class RewardSubject(PluginConformance):
    """What the tests of rewards share; `RewardConformance` describes what to override."""

    kind: ClassVar[Kind] = "reward"
    timeout_s: ClassVar[float] = 10.0
    examples: ClassVar[Sequence[tuple[Completion, float]]] = ()
    unscorable: ClassVar[Sequence[Completion]] = ()
    reference_is_optional: ClassVar[bool] = False
    variables: ClassVar[Sequence[str]] = ()

    @pytest.fixture
    def context(self) -> RewardContext:
        """A reward's context."""
        return RewardContext(name=self.plugin, seed=0)

    @pytest.fixture
    def completions(self, capabilities: RewardCapabilities) -> Sequence[Completion]:
        """Ordinary completions, all of which must get a score."""
        if not capabilities.payload_kinds & {"tokens", "media"}:
            kinds = ", ".join(sorted(capabilities.payload_kinds))
            fault(
                f"it scores payloads of kind {kinds}, and the kit's own completions are text or pictures; "
                "override the fixture `completions` with some that have payloads"
            )
        return ordinary_completions() if "tokens" in capabilities.payload_kinds else ordinary_pictures()

    @pytest.fixture
    def in_worker(self, options: Mapping[str, JSON], context: RewardContext) -> ScoreInWorker:
        """Score completions in a worker, as a run does."""
        config = RewardConfig(plugin=self.plugin, options=options, timeout_s=self.timeout_s)

        def score(completions: Sequence[Completion], *, hash_seed: str = "0") -> WorkerRun:
            return score_in_worker(config, completions, hash_seed=hash_seed, seed=context.seed)

        return score

    @pytest.fixture(scope="class")
    @classmethod
    def worker_runs(cls) -> dict[str, WorkerRun]:
        """Earlier runs of a worker, by what was scored with which options: scores may be dear."""
        return {}

    @pytest.fixture(scope="class")
    @classmethod
    def judgements(cls) -> dict[str, list[Judged]]:
        """Earlier scores in this process, likewise."""
        return {}

    @pytest.fixture
    def key(self, options: Mapping[str, JSON], completions: Sequence[Completion]) -> str:
        """What is scored, with which options."""
        return repr((options, [shown(each) for each in completions]))

    @pytest.fixture
    def worker_run(
        self, worker_runs: dict[str, WorkerRun], key: str, in_worker: ScoreInWorker, completions: Sequence[Completion]
    ) -> WorkerRun:
        """What a worker made of the ordinary completions."""
        if key not in worker_runs:
            worker_runs[key] = in_worker(completions)
        return worker_runs[key]

    @pytest.fixture
    def sound_run(self, worker_run: WorkerRun) -> WorkerRun:
        """The same, if every completion got a score."""
        if not worker_run.is_sound:
            pytest.skip("a worker failed at ordinary completions; the faults of other tests say how")
        return worker_run

    @pytest.fixture
    def reward(self, sound_run: WorkerRun, make: Callable[..., Any]) -> Reward:  # noqa: ARG002 - a condition
        """The reward in this process, which it must neither hang nor end: a worker has shown that."""
        made: Reward = make()
        if isinstance(made, Loading):
            made.load()
        return made

    @pytest.fixture
    def judged(
        self, judgements: dict[str, list[Judged]], key: str, reward: Reward, completions: Sequence[Completion]
    ) -> list[Judged]:
        """What the reward makes of the ordinary completions in this process."""
        if key not in judgements:
            judgements[key] = judge(
                reward, [attrs.evolve(each, prompt=copy.deepcopy(each.prompt)) for each in completions]
            )
        return judgements[key]
