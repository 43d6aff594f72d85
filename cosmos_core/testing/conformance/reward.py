"""The kit for rewards."""

from __future__ import annotations

import copy
import math
import numbers
import random
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar, Protocol

import attrs
import pytest

from cosmos_core.config.schema import AlgorithmConfig, DatasetConfig, ModelConfig, Recipe, RewardConfig, RunConfig
from cosmos_core.errors import CosmosError, DataError
from cosmos_core.protocols import (
    AlgorithmCapabilities,
    Completion,
    DatasetCapabilities,
    EngineCapabilities,
    Kind,
    Reward,
    RewardCapabilities,
    RewardContext,
    Score,
)
from cosmos_core.protocols.reward import Loading, Requiring, Vetting
from cosmos_core.testing.conformance.planning import planned
from cosmos_core.testing.conformance.plugin import PluginConformance, fault, json_problems
from cosmos_core.testing.conformance.scoring import (
    Judged,
    WorkerRun,
    attempt,
    cancel,
    judge,
    number,
    ordinary_completions,
    ordinary_pictures,
    score_in_worker,
    shown,
)
from cosmos_core.types import JSON, SampleStatus


class ScoreInWorker(Protocol):
    """Scores completions in a worker process."""

    def __call__(self, completions: Sequence[Completion], *, hash_seed: str = "0") -> WorkerRun:
        """Score them in a worker with this `PYTHONHASHSEED`."""
        ...


_SHOWN = 3


def _is_another(value: Any, score: float) -> bool:
    """True if it is a finite number, and not this score."""
    return isinstance(value, numbers.Real) and math.isfinite(value) and not math.isclose(value, score, abs_tol=1e-6)


def _listed(what: str, items: Sequence[str]) -> str:
    more = f"\n  and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return f"{what}:" + "".join(f"\n  {item}" for item in items[:_SHOWN]) + more


def refusals(plugin: str, capabilities: RewardCapabilities, made: AbstractSet[str]) -> list[str]:
    """Why planning refuses the reward beside an engine that makes payloads of the kinds `made`.

    Payloads of kind `media` are what an engine of latents renders.
    """
    recipe = Recipe(
        run=RunConfig(name="conformance", steps=1),
        model=ModelConfig(config={}),
        algorithm=AlgorithmConfig(plugin="any"),
        dataset=DatasetConfig(plugin="any"),
        reward=(RewardConfig(plugin=plugin),),
    )
    kinds = frozenset(kind if kind != "media" else "latents" for kind in made)
    found = planned(
        recipe,
        algorithm=AlgorithmCapabilities(payload_kinds=kinds),
        reward=capabilities,
        engine=EngineCapabilities(payload_kinds=kinds, renders="media" in made),
        dataset=DatasetCapabilities(),
    )
    return [problem for problem in found if f"reward {plugin!r}" in problem]


_UNDECLARED = "a_kind_that_is_not_declared"
_TOLERANCE = 1e-6


def _needs_determinism(capabilities: RewardCapabilities) -> None:
    if not capabilities.deterministic:
        pytest.skip("not declared: deterministic")


def _differs(completion: Completion, seen: Sequence[Any], where: str) -> str:
    return (
        f"{shown(completion)} scored {', '.join(map(str, seen))}: {where}; compute it from the completion alone "
        "(no state, no hash(), no order of a set), or declare RewardCapabilities(deterministic=False)"
    )


def _refusal(reward: Reward, completion: Completion) -> Exception | None:
    if not isinstance(reward, Vetting):
        pytest.skip("not there: `vet`")
    try:
        reward.vet(completion.prompt)
    except Exception as error:  # noqa: BLE001 - which error it is, is what is tested
        return error
    return None


def _told(reward: Any) -> str:
    if not isinstance(reward, Requiring):
        pytest.skip("not there: `absent`")
    told: Any = reward.absent()
    if not isinstance(told, str):
        fault(f"`absent` returned {told!r:.100}; return a str, empty where nothing is absent")
    return told


class RewardConformance(PluginConformance):
    """Tests that every reward must pass: a number for whatever a model writes, in time, in the workers of a run.

    Set `plugin`, and what else the defaults do not do for.

    Attributes:
        timeout_s: Seconds that a score may take; the recipe's default.
        examples: Completions, each with the score that it must get.
        unscorable: Completions for which `score` must raise, such as one of a prompt without a usable reference.
        reference_is_optional: Whether the reward judges answers without a reference too, and may score them otherwise.
        variables: Variables of the environment that the reward needs, which the tests set.

    Fixtures to override: `options`, the options to test with; `completions`, ordinary ones that must all get a score.
    The default ones answer an arithmetic question with the reference "8", rightly, wrongly and in every garbled way.
    """

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
        """The completions and options as a key."""
        return repr((options, [shown(each) for each in completions]))

    @pytest.fixture
    def worker_run(
        self, worker_runs: dict[str, WorkerRun], key: str, in_worker: ScoreInWorker, completions: Sequence[Completion]
    ) -> WorkerRun:
        """The results of a worker for the ordinary completions."""
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
        """Scores of the ordinary completions in this process."""
        if key not in judgements:
            judgements[key] = judge(
                reward, [attrs.evolve(each, prompt=copy.deepcopy(each.prompt)) for each in completions]
            )
        return judgements[key]

    def test_every_ordinary_completion_gets_a_score(
        self, worker_run: WorkerRun, completions: Sequence[Completion]
    ) -> None:
        """A wrong, empty or garbled answer is scored low; raising is for what cannot be judged at all."""
        failed = [
            f"{shown(completion)}: {outcome.detail}"
            for completion, outcome in zip(completions, worker_run.outcomes, strict=True)
            if outcome is not None and outcome.status is SampleStatus.REWARD_FAILED
        ]
        if failed:
            fault(_listed(f"{len(failed)} of {len(completions)} ordinary completions got no score", failed))

    def test_it_answers_in_time(self, worker_run: WorkerRun, completions: Sequence[Completion]) -> None:
        """A run waits `timeout_s` of the recipe for a score, then ends the worker and drops the sample."""
        for completion, outcome in zip(completions, worker_run.outcomes, strict=True):
            if outcome is not None and outcome.status is SampleStatus.REWARD_TIMEOUT:
                fault(
                    f"{shown(completion)} got no score within {self.timeout_s:g} s; make `score` quicker, "
                    "or set `timeout_s` of the test class to what recipes must give it"
                )

    def test_it_leaves_no_process_behind(self, worker_run: WorkerRun) -> None:
        """A worker may be ended at any time, and what it started must not outlive it."""
        if worker_run.leftovers:
            fault(_listed("`score` starts processes that outlive the worker; wait for them", worker_run.leftovers))

    def test_a_coroutine_can_be_cancelled(self, reward: Reward, judged: list[Judged]) -> None:
        """One that takes too long is cancelled, so that the worker can go on with the others."""
        ending = next((cancel(reward, each.completion) for each in judged if each.awaited), None)
        if ending is None:
            pytest.skip("`score` is no coroutine")
        if ending in ("goes on", "hangs"):
            fault("`score` goes on after it is cancelled; let asyncio.CancelledError through")

    def test_what_cannot_be_scored_raises(self, reward: Reward) -> None:
        """A made-up number would train the model on the mistake."""
        self._needs_unscorable()
        for completion in self.unscorable:
            error = attempt(reward, completion)
            if not isinstance(error, Exception):
                fault(f"{shown(completion)} cannot be scored, but `score` returned; raise an error that says why")
            if not str(error).strip():
                fault(f"{shown(completion)} raised {error!r} without a message; say why it cannot be scored")

    def test_no_score_is_made_up_without_a_reference(self, capabilities: RewardCapabilities, reward: Reward) -> None:
        """A dataset whose rows lack the reference would train the model on whatever `score` falls back to."""
        referring = [(each, score) for each, score in self.examples if each.prompt.reference is not None]
        if not referring:
            pytest.skip("not given: `examples` whose prompts have a reference")
        if self.reference_is_optional or not capabilities.deterministic:
            pytest.skip("declared: a score may be another one without the reference")
        for completion, score in referring:
            bare = attrs.evolve(completion, prompt=attrs.evolve(completion.prompt, reference=None))
            value = number(attempt(reward, bare))
            if _is_another(value, score):
                fault(
                    f"{shown(completion)} scores {score}, and {value} when its prompt has no reference: a number that "
                    "is made up; raise an error that says why and list such a completion in `unscorable`, or set "
                    "`reference_is_optional = True` if the reward judges answers without a reference on purpose"
                )

    def test_what_was_not_rendered_raises(
        self, capabilities: RewardCapabilities, reward: Reward, completions: Sequence[Completion]
    ) -> None:
        """An engine that renders nothing gives pictures no score, and certainly not that of a black one."""
        if "media" not in capabilities.payload_kinds or completions[0].media is None:
            pytest.skip("not declared: payloads of kind media, or not looked at")
        bare = attrs.evolve(completions[0], payload=None, media=None)
        error = attempt(reward, bare)
        if not isinstance(error, Exception):
            fault(f"{shown(bare)} has no frames, but `score` returned {number(error)}; raise an error that says so")
        if not str(error).strip():
            fault(f"{shown(bare)} has no frames, and raised {error!r} without a message; say so")

    def test_a_failure_costs_its_own_sample_alone(
        self, in_worker: ScoreInWorker, sound_run: WorkerRun, completions: Sequence[Completion]
    ) -> None:
        """The sample gets a status with the reward's message; those beside it get their scores."""
        self._needs_unscorable()
        run = in_worker([*self.unscorable, completions[0]])
        for completion, outcome in zip(self.unscorable, run.outcomes, strict=False):
            if outcome is None or outcome.status is not SampleStatus.REWARD_FAILED:
                fault(f"{shown(completion)} must end as reward_failed, and ended as {outcome}")
        beside, alone = run.outcomes[-1], sound_run.outcomes[0]
        if beside is None or alone is None or beside.status is not SampleStatus.OK:
            fault(f"{shown(completions[0])} got a score alone, but after failures: {beside}; keep no state of them")

    def _needs_unscorable(self) -> None:
        if not self.unscorable:
            pytest.skip("not given: `unscorable`, completions for which `score` must raise")

    def test_a_score_is_a_number(self, judged: list[Judged]) -> None:
        """Statistics and advantages are computed from it."""
        for each in judged:
            value = each.value
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
                kind = type(value).__name__
                fault(f"{shown(each.completion)} scored {value!r:.100}, a {kind}; return a finite float or a Score")

    def test_details_are_plain_json(self, judged: list[Judged]) -> None:
        """They are shown in other processes."""
        for each in judged:
            if isinstance(each.outcome, Score):
                for problem in json_problems(dict(each.outcome.details), "details"):
                    fault(f"{shown(each.completion)}: {problem}")

    def test_it_changes_nothing_that_it_is_given(self, judged: list[Judged]) -> None:
        """Other rewards and samples of the group see the same prompt."""
        for each in judged:
            if each.changed:
                fault(f"scoring changed the prompt, payload or media of {shown(each.completion)}; work on a copy")

    def test_the_same_completion_gets_the_same_score(
        self, capabilities: RewardCapabilities, judged: list[Judged], reward: Reward, completions: Sequence[Completion]
    ) -> None:
        """Whatever was scored before it, and by whichever instance."""
        _needs_determinism(capabilities)
        again = judge(reward, [*completions, *reversed(completions)])
        last = len(again) - 1
        for index, completion in enumerate(completions):
            seen = (judged[index].value, again[index].value, again[last - index].value)
            if len(set(seen)) > 1:
                fault(_differs(completion, seen, "by one instance, by another, and by that one again in another order"))

    def test_another_process_gives_the_same_score(
        self,
        capabilities: RewardCapabilities,
        sound_run: WorkerRun,
        in_worker: ScoreInWorker,
        completions: Sequence[Completion],
    ) -> None:
        """Each replica has workers of its own, and a score must not depend on which of them gave it."""
        _needs_determinism(capabilities)
        order = random.Random(0).sample(range(len(completions)), len(completions))  # noqa: S311 - no secret
        run = in_worker([completions[index] for index in order], hash_seed="1")
        for index, outcome in zip(order, run.outcomes, strict=True):
            first = sound_run.outcomes[index]
            seen = tuple(None if each is None else each.value for each in (first, outcome))
            if len(set(seen)) > 1:
                fault(_differs(completions[index], seen, "in one process, and in another with another hash seed"))

    def test_the_examples_get_their_scores(self, reward: Reward) -> None:
        """Its documentation promises them."""
        if not self.examples:
            pytest.skip("not given: `examples`, completions with the scores that they must get")
        found = judge(reward, [completion for completion, _ in self.examples])
        for each, (completion, expected) in zip(found, self.examples, strict=True):
            if not math.isclose(each.value, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
                fault(f"{shown(completion)} scored {each.value}, and `examples` says {expected}")

    def test_only_declared_payload_kinds_are_planned(self, capabilities: RewardCapabilities) -> None:
        """A recipe with an engine that makes other payloads is refused before it starts."""
        kinds: Any = capabilities.payload_kinds
        if not isinstance(kinds, frozenset) or not kinds or not all(isinstance(kind, str) for kind in kinds):
            fault(f"payload_kinds is {kinds!r}; declare what it scores, such as frozenset({{'tokens'}})")
        for kind in sorted(kinds):
            for refusal in refusals(self.plugin, capabilities, {kind}):
                fault(f"it declares payloads of kind {kind!r}, but planning refuses it: {refusal}")
        if not refusals(self.plugin, capabilities, {_UNDECLARED}):
            fault(f"planning accepts it beside an engine of payloads {_UNDECLARED!r}: a fault of cosmos-core")

    def test_what_it_scores_passes_its_vetting(self, reward: Reward, completions: Sequence[Completion]) -> None:
        """Rows that it refuses count as unusable, and a run whose rows all are is not started."""
        for completion in (*completions, *(each for each, _ in self.examples)):
            error = _refusal(reward, completion)
            if error is not None:
                fault(f"`vet` refuses the prompt of {shown(completion)}, which gets a score: {error}")

    def test_what_its_vetting_refuses_cannot_be_scored(self, reward: Reward) -> None:
        """A run goes by `score`; what planning says before it must be the same."""
        for completion in self.unscorable:
            error = _refusal(reward, completion)
            if error is None:
                continue
            if not isinstance(error, DataError) or not str(error).strip():
                kind = type(error).__name__
                fault(
                    f"`vet` raised {kind} ({error}) for the prompt of {shown(completion)}; raise a DataError saying why"
                )
            if not isinstance(attempt(reward, completion), Exception):
                fault(f"`vet` refuses the prompt of {shown(completion)}, but `score` returned; let both say the same")

    def test_it_lacks_nothing_where_it_scores(self, sound_run: WorkerRun, make: Callable[..., Any]) -> None:  # noqa: ARG002 - a condition
        """No run starts where a reward lacks something."""
        told = _told(make())
        if told:
            fault(f"`absent` says {told!r}, where a worker has scored; return '' where nothing is absent")

    def test_it_says_what_is_absent(self, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """Planning must say first what would end the run."""
        if not self.variables:
            pytest.skip("not given: `variables`, those of the environment that it needs")
        for name in self.variables:
            monkeypatch.delenv(name, raising=False)
        reward = make()
        told = _told(reward)
        unnamed = [name for name in self.variables if name not in told]
        if unnamed:
            fault(f"`absent` says {told!r} without {', '.join(unnamed)} in the environment; name what to set")
        if not isinstance(reward, Loading):
            return
        try:
            reward.load()
        except CosmosError:
            return
        except Exception as error:  # noqa: BLE001 - which error it is, is what is tested
            fault(f"`absent` says {told!r}, and `load` raised {type(error).__name__} ({error}); raise a ConfigError")
        fault(f"`absent` says {told!r}, but `load` returned; let both say the same")
