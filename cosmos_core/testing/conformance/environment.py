"""The kit for environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Protocol

import pytest

from cosmos_core.config.schema import AlgorithmConfig, DatasetConfig, EnvironmentConfig, ModelConfig, Recipe, RunConfig
from cosmos_core.protocols import (
    AlgorithmCapabilities,
    DatasetCapabilities,
    EngineCapabilities,
    EnvironmentCapabilities,
    EnvironmentContext,
    Kind,
    RewardCapabilities,
)
from cosmos_core.testing.conformance.dialogues import (
    Hosted,
    Script,
    Transcript,
    WorkerRun,
    host,
    ordinary_scripts,
    play_in_worker,
    shown,
)
from cosmos_core.testing.conformance.planning import planned
from cosmos_core.testing.conformance.plugin import PluginConformance, fault
from cosmos_core.types import JSON, Prompt


def refusals(plugin: str, capabilities: EnvironmentCapabilities, *, weight: float) -> list[str]:
    """Why planning refuses the environment with this weight."""
    recipe = Recipe(
        run=RunConfig(name="conformance", steps=1),
        model=ModelConfig(config={}),
        algorithm=AlgorithmConfig(plugin="any"),
        dataset=DatasetConfig(plugin="any"),
        environment=EnvironmentConfig(plugin=plugin, weight=weight),
    )
    found = planned(
        recipe,
        algorithm=AlgorithmCapabilities(),
        reward=RewardCapabilities(),
        engine=EngineCapabilities(),
        dataset=DatasetCapabilities(),
        environment=capabilities,
    )
    return [problem for problem in found if problem.startswith("environment.")]


class PlayInWorker(Protocol):
    """Plays dialogues in a worker process."""

    def __call__(self, scripts: Sequence[Script], *, hash_seed: str = "0", at_once: bool = False) -> WorkerRun:
        """Play them in a worker with this `PYTHONHASHSEED`, one by one or in turns."""
        ...


_BLOCKED_S: Final = 2.0
_SHOWN: Final = 3


def _played(run: WorkerRun, scripts: Sequence[Script]) -> list[tuple[Script, Transcript]]:
    pairs = zip(scripts, run.transcripts, strict=True)
    return [(script, transcript) for script, transcript in pairs if transcript is not None]


class EnvironmentConformance(PluginConformance):
    """Tests that every environment must pass: an answer to whatever a model writes, in time, in the workers of a run.

    Set `plugin`, and what else the defaults do not do for.

    Attributes:
        timeout_s: Seconds that an answer may take; the recipe's default.
        turns: Turns of the model that mean something to the environment, such as a call of a tool.
        examples: Dialogues: a row, the model's turns, and the observations that they must get, None where none comes.

    Fixtures to override: `options`, the options to test with; `scripts`, ordinary dialogues that must all go their
    way. The default ones have each of `turns`, and garbled ones of every kind, three times over.
    """

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
        """The results of a worker for the ordinary dialogues."""
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
        """Side effects of the ordinary dialogues in this process."""
        return host(make, scripts, context.seed)

    def test_every_ordinary_dialogue_goes_its_way(self, worker_run: WorkerRun, scripts: Sequence[Script]) -> None:
        """A garbled turn gets an answer that says so, or ends the dialogue; raising is for what cannot go on."""
        failed = [
            f"{shown(script)}: {transcript.failed.detail}"
            for script, transcript in _played(worker_run, scripts)
            if transcript.failed is not None and not transcript.failed.timed_out
        ]
        if failed:
            listed = "".join(f"\n  {each}" for each in failed[:_SHOWN])
            fault(f"{len(failed)} of {len(scripts)} ordinary dialogues failed:{listed}")

    def test_it_answers_in_time(self, worker_run: WorkerRun, scripts: Sequence[Script]) -> None:
        """A run waits `timeout_s` of the recipe for an answer, then gives the sample up."""
        for script, transcript in _played(worker_run, scripts):
            if transcript.failed is not None and transcript.failed.timed_out:
                fault(
                    f"{shown(script)} got no answer within {self.timeout_s:g} s; be quicker, "
                    "or set `timeout_s` of the test class to what recipes must give it"
                )

    def test_it_leaves_no_process_behind(self, worker_run: WorkerRun) -> None:
        """A worker may be ended at any time, and what it started must not outlive it."""
        if worker_run.leftovers:
            listed = "".join(f"\n  {each}" for each in worker_run.leftovers[:_SHOWN])
            fault(f"it starts processes that outlive the worker; end them in `close`:{listed}")

    def test_it_never_blocks_the_event_loop(self, hosted: Hosted) -> None:
        """All dialogues of a worker share it."""
        if hosted.blocked_s > _BLOCKED_S:
            fault(
                f"{hosted.where} held up the event loop, and all other dialogues of the worker, for "
                f"{hosted.blocked_s:.1f} s; put what blocks into `await asyncio.to_thread(…)`"
            )

    def test_nothing_goes_on_after_close(self, hosted: Hosted) -> None:
        """A worker has thousands of dialogues in its life."""
        if hosted.left:
            fault(f"tasks go on after `close`: {', '.join(hosted.left[:_SHOWN])}; cancel them and wait for their end")

    def test_it_changes_nothing_that_it_is_given(self, hosted: Hosted) -> None:
        """Rewards and the other samples of the group see the same row."""
        if hosted.changed:
            fault(f"{hosted.changed[0]} changed its row; work on a copy")

    def test_dialogues_do_not_disturb_each_other(
        self, sound_run: WorkerRun, scripts: Sequence[Script], request: pytest.FixtureRequest
    ) -> None:
        """A worker has many at once."""
        self.needs_determinism(request)
        both = request.getfixturevalue("in_worker")(scripts, at_once=True)
        for script, alone, among in zip(scripts, sound_run.transcripts, both.transcripts, strict=True):
            if alone is not None and among is not None and alone.said != among.said:
                fault(
                    f"{shown(script)} got {among.said!r:.200} among others, and {alone.said!r:.200} alone; keep the "
                    "state of a dialogue in its own instance"
                )

    def needs_determinism(self, request: pytest.FixtureRequest) -> None:
        """Skip the test unless the environment declares that its answers can be had again."""
        if not request.getfixturevalue("capabilities").deterministic:
            pytest.skip("not declared: deterministic")

    def test_another_process_gives_the_same_answers(
        self, sound_run: WorkerRun, scripts: Sequence[Script], in_worker: PlayInWorker, request: pytest.FixtureRequest
    ) -> None:
        """Each replica has workers of its own, and the samples of a group are to be comparable."""
        self.needs_determinism(request)
        other = in_worker(list(reversed(scripts)), hash_seed="1")
        for script, one, two in zip(scripts, sound_run.transcripts, reversed(other.transcripts), strict=True):
            if one is not None and two is not None and one.said != two.said:
                fault(
                    f"{shown(script)} got {one.said!r:.200} in one process and {two.said!r:.200} in another, after "
                    "other dialogues and with another hash seed; draw from the seed that `reset` is given, or declare "
                    "EnvironmentCapabilities(deterministic=False)"
                )

    def test_rewards_are_declared(
        self, capabilities: EnvironmentCapabilities, sound_run: WorkerRun, scripts: Sequence[Script]
    ) -> None:
        """Undeclared rewards are not counted."""
        if capabilities.rewards:
            return
        for script, transcript in zip(scripts, sound_run.transcripts, strict=True):
            given = [each.reward for each in transcript.answers if each.reward] if transcript is not None else []
            if given:
                fault(
                    f"{shown(script)} got a reward of {given[0]:g}, which no run would count; declare "
                    "EnvironmentCapabilities(rewards=True)"
                )

    def test_the_examples_get_their_answers(self, in_worker: PlayInWorker) -> None:
        """Its documentation promises them."""
        if not self.examples:
            pytest.skip("not given: `examples`, dialogues with the observations that they must get")
        scripts = [Script(prompt=prompt, turns=tuple(turns)) for prompt, turns, _ in self.examples]
        run = in_worker(scripts)
        for script, transcript, (_, _, expected) in zip(scripts, run.transcripts, self.examples, strict=True):
            if transcript is None or transcript.failed is not None:
                why = "another example took too long" if transcript is None else str(transcript.failed)
                fault(f"{shown(script)} has no answers: {why}")
            found = [each.observation for each in transcript.answers]
            if found != list(expected):
                fault(f"{shown(script)} got {found!r:.300}, and `examples` says {list(expected)!r:.300}")

    def test_planning_refuses_to_count_rewards_that_are_not_declared(
        self, capabilities: EnvironmentCapabilities
    ) -> None:
        """A recipe that weighs them is refused before it starts."""
        refused = refusals(self.plugin, capabilities, weight=1.0)
        if capabilities.rewards and refused:
            fault(f"it declares rewards, but planning refuses them: {refused[0]}")
        if not capabilities.rewards and not refused:
            fault("planning counts rewards that are not declared: a fault of cosmos-core")
