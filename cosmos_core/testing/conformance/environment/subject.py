"""The environment under test: what is played, in a worker or here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import pytest

from cosmos_core.config.schema import EnvironmentConfig
from cosmos_core.protocols import EnvironmentContext, Kind
from cosmos_core.testing.conformance.environment.dialogues import Script, ordinary_scripts, shown
from cosmos_core.testing.conformance.environment.hosting import Hosted, host
from cosmos_core.testing.conformance.environment.workers import WorkerRun, play_in_worker
from cosmos_core.testing.conformance.plugin import PluginConformance
from cosmos_core.types import JSON, Prompt


class PlayInWorker(Protocol):
    """Plays dialogues in a worker process."""

    def __call__(self, scripts: Sequence[Script], *, hash_seed: str = "0", at_once: bool = False) -> WorkerRun:
        """Play them in a worker with this `PYTHONHASHSEED`, one by one or in turns."""
        ...


class EnvironmentSubject(PluginConformance):
    """What the tests of environments share; `EnvironmentConformance` describes what to override."""

    kind: ClassVar[Kind] = "environment"
    timeout_s: ClassVar[float] = 10.0
    turns: ClassVar[Sequence[str]] = ()
    examples: ClassVar[Sequence[tuple[Prompt, Sequence[str], Sequence[str | None]]]] = ()

    @pytest.fixture
    def context(self) -> EnvironmentContext:
        """An environment's context."""
        return EnvironmentContext(name=self.plugin, seed=0)

    @pytest.fixture
    def scripts(self) -> Sequence[Script]:
        """Ordinary dialogues, each of which the environment must be able to have."""
        return ordinary_scripts(self.turns)

    @pytest.fixture
    def in_worker(self, options: Mapping[str, JSON], context: EnvironmentContext) -> PlayInWorker:
        """Play dialogues in a worker, as a run does."""
        config = EnvironmentConfig(plugin=self.plugin, options=options, timeout_s=self.timeout_s)

        def play(scripts: Sequence[Script], *, hash_seed: str = "0", at_once: bool = False) -> WorkerRun:
            return play_in_worker(config, scripts, hash_seed=hash_seed, seed=context.seed, at_once=at_once)

        return play

    @pytest.fixture(scope="class")
    @classmethod
    def worker_runs(cls) -> dict[str, WorkerRun]:
        """Earlier runs of a worker, by what was played with which options."""
        return {}

    @pytest.fixture
    def worker_run(
        self,
        worker_runs: dict[str, WorkerRun],
        options: Mapping[str, JSON],
        in_worker: PlayInWorker,
        scripts: Sequence[Script],
    ) -> WorkerRun:
        """What a worker made of the ordinary dialogues."""
        key = repr((options, [shown(each) for each in scripts]))
        if key not in worker_runs:
            worker_runs[key] = in_worker(scripts)
        return worker_runs[key]

    @pytest.fixture
    def sound_run(self, worker_run: WorkerRun) -> WorkerRun:
        """The same, if every dialogue went its way."""
        if not worker_run.is_sound:
            pytest.skip("a worker failed at ordinary dialogues; the faults of other tests say how")
        return worker_run

    @pytest.fixture
    def hosted(
        self,
        sound_run: WorkerRun,  # noqa: ARG002 - it has shown that the environment neither hangs nor ends this process
        make: Callable[..., Any],
        scripts: Sequence[Script],
        context: EnvironmentContext,
    ) -> Hosted:
        """What the ordinary dialogues do to this process."""
        return host(make, scripts, context.seed)
