"""The kit for rewards."""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

import attrs
import pytest

from cosmos_core.config.schema import RewardConfig
from cosmos_core.errors import CosmosError, DataError
from cosmos_core.protocols import (
    AlgorithmCapabilities,
    Completion,
    EngineCapabilities,
    Kind,
    Reward,
    RewardCapabilities,
    RewardContext,
    Score,
)
from cosmos_core.testing.conformance import scoring
from cosmos_core.testing.conformance.planning import any_recipe, planned
from cosmos_core.testing.conformance.plugin import fault, json_problems
from cosmos_core.testing.conformance.scoring import Judged, judge, judge_all_sound, shown
from cosmos_core.testing.conformance.worker import Answer, WorkerConformance, WorkerRun
from cosmos_core.types import JSON

_UNDECLARED = "a_kind_that_is_not_declared"
_TOLERANCE = 1e-6


def refusals(plugin: str, capabilities: RewardCapabilities, made: AbstractSet[str]) -> list[str]:
    """Why planning refuses the reward beside an engine that makes payloads of the kinds `made`.

    Payloads of kind `media` are what an engine of latents renders.
    """
    kinds = frozenset(kind if kind != "media" else "latents" for kind in made)
    found = planned(
        any_recipe(reward=(RewardConfig(plugin=plugin),)),
        algorithm=AlgorithmCapabilities(payload_kinds=kinds),
        reward=capabilities,
        engine=EngineCapabilities(payload_kinds=kinds, renders="media" in made),
    )
    return [problem for problem in found if f"reward {plugin!r}" in problem]


def _told(reward: Any) -> str:
    if not hasattr(reward, "absent"):
        pytest.skip("not there: `absent`")
    told: Any = reward.absent()
    if not isinstance(told, str):
        fault(f"`absent` returned {told!r:.100}; return a str, empty where nothing is absent")
    return told


def _fault_unless_raised(judged: Judged) -> None:
    """Refuse a score of what cannot be scored, and an error that does not say why there is none."""
    error = judged.outcome
    if not isinstance(error, Exception):
        what = f"{shown(judged.completion)} cannot be scored, but `score` returned {judged.value}"
        fault(f"{what}; raise an error that says why")
    if not str(error).strip():
        fault(f"{shown(judged.completion)} raised {error!r} without a message; say why it cannot be scored")


class RewardConformance(WorkerConformance):
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
    inputs_failed: ClassVar[str] = "completions got no score"
    purity: ClassVar[str] = "compute it from the completion alone (no state, no hash(), no order of a set)"
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
        is_text = "tokens" in capabilities.payload_kinds
        return scoring.ordinary_completions() if is_text else scoring.ordinary_pictures()

    @pytest.fixture
    def ordinary(self, completions: Sequence[Completion]) -> Sequence[Completion]:
        """The same, to be scored in a worker."""
        return completions

    @staticmethod
    def shown(given: Completion) -> str:
        """A completion in a message."""
        return shown(given)

    def answers(
        self, options: Mapping[str, JSON], seed: int, inputs: Sequence[Completion], *, at_once: bool
    ) -> list[Answer | None]:
        """Scores that a worker gives, which goes on with others while one waits."""
        del at_once
        config = RewardConfig(plugin=self.plugin, options=options, timeout_s=self.timeout_s)
        return scoring.score_in_worker(config, inputs, seed)

    @pytest.fixture
    def reward(self, sound_run: WorkerRun, make: Callable[..., Any]) -> Reward:  # noqa: ARG002 - a condition
        """The reward in this process, which it must neither hang nor end: a worker has shown that."""
        made: Reward = make()
        if hasattr(made, "load"):
            made.load()
        return made

    @pytest.fixture
    def judged(
        self, earlier: dict[object, Any], key: str, reward: Reward, completions: Sequence[Completion]
    ) -> list[Judged]:
        """Scores of the ordinary completions in this process."""
        place = ("judged", key)
        if place not in earlier:
            copies = [attrs.evolve(each, prompt=copy.deepcopy(each.prompt)) for each in completions]
            earlier[place] = judge_all_sound(reward, copies)
        found: list[Judged] = earlier[place]
        return found

    def test_scoring_gives_a_number_and_changes_nothing(self, reward: Reward, judged: list[Judged]) -> None:
        """Advantages are computed from it, other rewards see the same prompt; one that takes too long is cancelled."""
        for each in judged:
            value, what = each.value, shown(each.completion)
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
                fault(f"{what} scored {value!r:.100}, a {type(value).__name__}; return a finite float or a Score")
            if isinstance(each.outcome, Score):
                for problem in json_problems(dict(each.outcome.details), "details"):
                    fault(f"{what}: {problem}")
            if each.changed:
                fault(f"scoring changed the prompt, payload or media of {what}; work on a copy")
        awaited = [each.completion for each in judged if each.awaited]
        if awaited and scoring.goes_on_when_cancelled(reward, awaited[0]):
            fault("`score` goes on after it is cancelled; let asyncio.CancelledError through")

    def test_what_cannot_be_scored_raises(
        self,
        capabilities: RewardCapabilities,
        reward: Reward,
        completions: Sequence[Completion],
        in_worker: Callable[..., WorkerRun],
    ) -> None:
        """A made-up number would train the model on the mistake; those beside it get their scores in a worker."""
        given = list(self.unscorable)
        if "media" in capabilities.payload_kinds and completions[0].media is not None:
            given.append(attrs.evolve(completions[0], payload=None, media=None))
        if not given:
            pytest.skip("not given: `unscorable`, completions for which `score` must raise")
        for each in judge(reward, given):
            _fault_unless_raised(each)
        if not self.unscorable:
            return
        *failed, beside = in_worker([*self.unscorable, completions[0]]).answers
        for completion, answer in zip(self.unscorable, failed, strict=True):
            if answer is None or not answer.failure or answer.timed_out:
                fault(f"{shown(completion)} must end as reward_failed, and ended as {answer}")
        if beside is None or beside.failure:
            fault(f"{shown(completions[0])} got a score alone, but after failures: {beside}; keep no state of them")

    def test_the_same_completion_gets_the_same_score(
        self, capabilities: RewardCapabilities, judged: list[Judged], reward: Reward, completions: Sequence[Completion]
    ) -> None:
        """Whatever was scored before it, and by whichever instance."""
        self.needs_determinism(capabilities)
        again = judge_all_sound(reward, [*completions, *reversed(completions)])
        for first, second, third in zip(judged, again, reversed(again), strict=False):
            seen = [each.value for each in (first, second, third)]
            if len(set(seen)) > 1:
                where = "by one instance, by another, and by that one again in another order"
                self.fault_differing(first.completion, seen, where)

    def test_the_examples_get_their_scores(self, capabilities: RewardCapabilities, reward: Reward) -> None:
        """Its documentation promises them; rows that lack the reference must not train on a number made up."""
        if not self.examples:
            pytest.skip("not given: `examples`, completions with the scores that they must get")
        found = judge_all_sound(reward, [completion for completion, _ in self.examples])
        for each, (completion, expected) in zip(found, self.examples, strict=True):
            if not math.isclose(each.value, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
                fault(f"{shown(completion)} scored {each.value}, and `examples` says {expected}")
        if self.reference_is_optional or not capabilities.deterministic:
            return
        referring = [(each, score) for each, score in self.examples if each.prompt.reference is not None]
        for completion, score in referring:
            bare = attrs.evolve(completion, prompt=attrs.evolve(completion.prompt, reference=None))
            value = judge(reward, [bare])[0].value
            is_number = isinstance(value, numbers.Real) and math.isfinite(value)
            if is_number and not math.isclose(value, score, abs_tol=_TOLERANCE):
                fault(
                    f"{shown(completion)} scores {score}, and {value} when its prompt has no reference: a number that "
                    "is made up; raise an error that says why and list such a completion in `unscorable`, or set "
                    "`reference_is_optional = True` if the reward judges answers without a reference on purpose"
                )

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

    def test_its_vetting_says_what_its_scores_say(self, reward: Reward, completions: Sequence[Completion]) -> None:
        """Rows that it refuses count as unusable, and a run whose rows all are is not started."""
        if not hasattr(reward, "vet"):
            pytest.skip("not there: `vet`")
        scored = (*completions, *(each for each, _ in self.examples))
        for completion in (*scored, *self.unscorable):
            try:
                reward.vet(completion.prompt)
            except Exception as error:  # noqa: BLE001 - which error it is, is what is tested
                what = f"the prompt of {shown(completion)}"
                if completion in scored:
                    fault(f"`vet` refuses {what}, which gets a score: {error}")
                if not isinstance(error, DataError) or not str(error).strip():
                    fault(f"`vet` raised {type(error).__name__} ({error}) for {what}; raise a DataError saying why")
                if not isinstance(judge(reward, [completion])[0].outcome, Exception):
                    fault(f"`vet` refuses {what}, but `score` returned; let both say the same")

    def test_it_says_what_is_absent(
        self,
        sound_run: WorkerRun,  # noqa: ARG002 - where it scores, nothing is absent
        make: Callable[..., Any],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Planning must say first what would end the run, and nothing else."""
        if told := _told(make()):
            fault(f"`absent` says {told!r}, where a worker has scored; return '' where nothing is absent")
        if not self.variables:
            return
        for name in self.variables:
            monkeypatch.delenv(name, raising=False)
        reward = make()
        told = _told(reward)
        unnamed = [name for name in self.variables if name not in told]
        if unnamed:
            fault(f"`absent` says {told!r} without {', '.join(unnamed)} in the environment; name what to set")
        if not hasattr(reward, "load"):
            return
        try:
            reward.load()
        except CosmosError:
            return
        except Exception as error:  # noqa: BLE001 - which error it is, is what is tested
            fault(f"`absent` says {told!r}, and `load` raised {type(error).__name__} ({error}); raise a ConfigError")
        fault(f"`absent` says {told!r}, but `load` returned; let both say the same")
