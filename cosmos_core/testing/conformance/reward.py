"""The kit for rewards."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import numbers
import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from typing import Any, ClassVar, Final

import attrs
import numpy as np
import numpy.typing as npt
import pytest

from cosmos_core.config.schema import RewardConfig
from cosmos_core.errors import CosmosError, DataError
from cosmos_core.protocols import Completion, Kind, Reward, RewardCapabilities, RewardContext, Score
from cosmos_core.rollout.rewards.messages import TO_WORKER, Task
from cosmos_core.rollout.rewards.pool import RewardPool
from cosmos_core.testing.conformance.plugin import Make, fault, json_problem
from cosmos_core.testing.conformance.worker import ENDLESS, GARBLED, METADATA, Answer, Ask, WorkerConformance, WorkerRun
from cosmos_core.threads import begin
from cosmos_core.types import JSON, Array, Message, Payload, Prompt, SampleStatus

_TOLERANCE: Final = 1e-6
_PATIENCE_S: Final = 5.0
_QUESTION: Final = "Ann has 7 apples, buys 5 more, then loses 4. How many apples now?"
_ANSWERS: Final = ("7+5=12\n12-4=8\n#### 8", "7+5=12\n#### 12", "The answer is 8.", *GARBLED)
_SCENE: Final = 'a red ball rolls past a sign that says "GO"'
_HEIGHT, _WIDTH = 24, 40


def _shown(given: Completion) -> str:
    text = given.text if len(given.text) <= 60 else f"{given.text[:50]}… ({len(given.text)} long)"
    payload = "" if given.payload is None else f", a payload of {given.payload.kind}"
    media = "" if given.media is None else f", frames {list(given.media.arrays['frames'].shape)}"
    cut = ", truncated" if given.truncated else ""
    return f"the completion {text!r} (reference {given.prompt.reference!r:.60}{payload}{media}{cut})"


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
    at_once: ClassVar[bool] = True
    inputs: ClassVar[str] = "completions"
    inputs_failed: ClassVar[str] = "completions got no score"
    shown = staticmethod(_shown)
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
        kinds = capabilities.payload_kinds
        if not kinds & {"tokens", "media"}:
            fault(
                f"it scores payloads of kind {', '.join(sorted(kinds))}, and the kit's own completions are text or "
                "pictures; override the fixture `completions` with some that have payloads"
            )
        return tuple(_ordinary_completions()) if "tokens" in kinds else _ordinary_pictures()

    def pool(self, options: Mapping[str, JSON], seed: int) -> RewardPool:
        """Workers of the reward."""
        reward = RewardConfig(plugin=self.plugin, options=options, timeout_s=self.timeout_s)
        return RewardPool([reward], num_workers=1, seed=seed)

    def answer(self, ask: Ask, pool: RewardPool, seed: int, given: Completion) -> Answer:
        """The score of a completion; a worker goes on with others while one waits."""
        del seed
        ((outcome,),), _ = ask(pool.submit, [given])
        failure = "" if outcome.value is not None else outcome.detail or outcome.status
        return Answer(said=(outcome.value,), failure=failure, timed_out=outcome.status is SampleStatus.REWARD_TIMEOUT)

    @pytest.fixture
    def reward(self, sound_run: WorkerRun, make: Make) -> Reward:  # noqa: ARG002 - a condition
        """The reward in this process, which it must neither hang nor end: a worker has shown that."""
        made: Reward = make()
        if hasattr(made, "load"):
            made.load()
        return made

    def test_scoring_gives_a_number_and_changes_nothing(
        self, reward: Reward, completions: Sequence[Completion]
    ) -> None:
        """Advantages are computed from it, other rewards see the same prompt; one that takes too long is cancelled."""
        for completion, score in zip(completions, _scores(reward, completions), strict=True):
            value, what = _value(score), _shown(completion)
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
                fault(f"{what} scored {value!r:.100}, a {type(value).__name__}; return a finite float or a Score")
            if isinstance(score, Score) and (problem := json_problem(dict(score.details), "details")):
                fault(f"{what}: {problem}")
        if _goes_on_when_cancelled(reward, completions):
            fault("`score` goes on after it is cancelled; let asyncio.CancelledError through")

    def test_what_cannot_be_scored_raises(
        self, capabilities: RewardCapabilities, reward: Reward, completions: Sequence[Completion]
    ) -> None:
        """A made-up number would train the model on the mistake; those beside it get their scores."""
        given = list(self.unscorable)
        if "media" in capabilities.payload_kinds and completions[0].media is not None:
            given.append(attrs.evolve(completions[0], payload=None, media=None))
        if not given:
            pytest.skip("not given: `unscorable`, completions for which `score` must raise")
        *errors, beside = _judge(reward, [*given, completions[0]])
        for completion, error in zip(given, errors, strict=True):
            what = _shown(completion)
            if not isinstance(error, Exception):
                fault(f"{what} cannot be scored, but `score` returned {_value(error)}; raise an error that says why")
            if not str(error).strip():
                fault(f"{what} raised {error!r} without a message; say why it cannot be scored")
        if isinstance(beside, Exception):
            fault(f"{_shown(completions[0])} got a score alone, but after failures: {beside}; keep no state of them")

    def test_the_examples_get_their_scores(self, capabilities: RewardCapabilities, reward: Reward) -> None:
        """The documentation promises these scores; rows that lack the reference must not train on a number made up."""
        if not self.examples:
            pytest.skip("not given: `examples`, completions with the scores that they must get")
        found = map(_value, _scores(reward, [completion for completion, _ in self.examples]))
        for value, (completion, expected) in zip(found, self.examples, strict=True):
            if not math.isclose(value, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
                fault(f"{_shown(completion)} scored {value}, and `examples` says {expected}")
        if self.reference_is_optional or not capabilities.deterministic:
            return
        for completion, score in self.examples:
            bare = attrs.evolve(completion, prompt=attrs.evolve(completion.prompt, reference=None))
            value = _value(_judge(reward, [bare])[0])
            is_number = isinstance(value, numbers.Real) and math.isfinite(value)
            if is_number and not math.isclose(value, score, abs_tol=_TOLERANCE):
                fault(
                    f"{_shown(completion)} scores {score}, and {value} when its prompt has no reference: a number that "
                    "is made up; raise an error that says why and list such a completion in `unscorable`, or set "
                    "`reference_is_optional = True` if the reward judges answers without a reference on purpose"
                )

    def test_what_it_scores_is_declared(self, capabilities: RewardCapabilities) -> None:
        """It is what an engine may make in a recipe; another engine is refused before it starts."""
        kinds: Any = capabilities.payload_kinds
        if not isinstance(kinds, frozenset) or not kinds or not all(isinstance(kind, str) for kind in kinds):
            fault(f"payload_kinds is {kinds!r}; declare what it scores, such as frozenset({{'tokens'}})")

    def test_its_vetting_says_what_its_scores_say(self, reward: Reward, completions: Sequence[Completion]) -> None:
        """Rows that it refuses count as unusable, and a run whose rows all are is not started."""
        if not hasattr(reward, "vet"):
            pytest.skip("not there: `vet`")
        scored = (*completions, *(each for each, _ in self.examples))
        for completion in (*scored, *self.unscorable):
            try:
                reward.vet(completion.prompt)
            except Exception as error:  # noqa: BLE001 - which error it is, is what is tested
                what = f"the prompt of {_shown(completion)}"
                if completion in scored:
                    fault(f"`vet` refuses {what}, which gets a score: {error}")
                if not isinstance(error, DataError) or not str(error).strip():
                    fault(f"`vet` raised {type(error).__name__} ({error}) for {what}; raise a DataError saying why")
                if not isinstance(_judge(reward, [completion])[0], Exception):
                    fault(f"`vet` refuses {what}, but `score` returned; let both say the same")

    def test_it_says_what_is_absent(
        self,
        sound_run: WorkerRun,  # noqa: ARG002 - where it scores, nothing is absent
        make: Make,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Planning must say first what would end the run, and nothing else."""
        reward = make()
        if not hasattr(reward, "absent"):
            pytest.skip("not there: `absent`")
        if (told := reward.absent()) != "":
            fault(f"`absent` says {told!r:.100}, where a worker has scored; return '' where nothing is absent")
        if not self.variables:
            return
        for name in self.variables:
            monkeypatch.delenv(name, raising=False)
        reward = make()
        told, outcome = reward.absent(), "returned"
        if unnamed := [name for name in self.variables if name not in told]:
            fault(f"`absent` says {told!r} without {', '.join(unnamed)} in the environment; name what to set")
        if hasattr(reward, "load"):
            try:
                reward.load()
            except CosmosError:
                return
            except Exception as error:  # noqa: BLE001 - which error it is, is what is tested
                outcome = f"raised {type(error).__name__} ({error})"
            fault(f"`absent` says {told!r}, but `load` {outcome}; let it raise a ConfigError that says the same")

    def test_it_names_the_variables_that_are_not_given(self, reward: Reward) -> None:
        """People are told of them before a cluster's machines are taken."""
        if not hasattr(reward, "unset_variables"):
            pytest.skip("not there: `unset_variables`")
        for given in ((), self.variables):
            unset, wanted = reward.unset_variables(given), set(self.variables).difference(given)
            if set(unset) != wanted:
                fault(f"`unset_variables` of {given} says {unset!r:.100}; it should be {sorted(wanted)}")


def _ordinary_completions() -> Iterator[Completion]:
    """Right, wrong, empty, truncated, garbled and endless answers to a question with a reference, and a dialogue."""
    prompt = Prompt(text=_QUESTION, reference="8", metadata=copy.deepcopy(METADATA))
    chat = Prompt(text=(_said("system", "Be brief."), _said("user", _QUESTION)), reference="8")
    calls = (_said("assistant", "calc: 7+5-4="), _said("tool", "8\n"), _said("assistant", "#### 9"))
    alone = [(prompt, text, False) for text in _ANSWERS] + [(prompt, text, True) for text in (*ENDLESS, "7+5=1")]
    answered = [(prompt, (_said("assistant", text),), cut) for prompt, text, cut in [*alone, (chat, "#### 8", False)]]
    for given, turns, is_cut in (*answered, (attrs.evolve(prompt, metadata={}), calls, False)):
        text = "".join(turn.content for turn in turns)
        number = sum(len(turn.content) for turn in turns if turn.role != "tool") + 1
        yield Completion(prompt=given, text=text, truncated=is_cut, turns=turns, num_units=number)


def _said(role: Any, content: str) -> Message:
    return Message(role=role, content=content)


def _ordinary_pictures() -> tuple[Completion, ...]:
    """Videos that move, stand still, are black, white, noise or of other shapes, of a prompt that names a colour."""
    noise = np.random.default_rng(0).integers(0, 256, (3, _HEIGHT, _WIDTH, 3), np.uint8)
    ball = np.zeros((4, _HEIGHT, _WIDTH, 3), np.uint8)
    for index, frame in enumerate(ball):
        frame[8:16, 4 + 6 * index : 12 + 6 * index] = (255, 0, 0)
    still = (noise, np.zeros_like(ball), np.full_like(ball, 255), np.repeat(noise[:1], 9, axis=0))
    return (
        *map(shown_as, (ball, ball[::-1], *still)),
        shown_as(noise[:2, :3, :5], truncated=True),
        shown_as(np.zeros((2, 40, 8, 3), np.uint8), chat=True),
    )


def shown_as(frames: npt.NDArray[np.uint8], *, truncated: bool = False, chat: bool = False) -> Completion:
    """A completion that looks like these frames [F, height, width, 3], which a reward could write to."""
    metadata: dict[str, JSON] = {"source": "conformance kit", "tags": ["ball", "kit"]}
    arrays = {
        "frames": Array(dtype="uint8", shape=frames.shape, data=memoryview(bytearray(frames.tobytes()))),
        "fps": Array(dtype="float32", shape=(), data=struct.pack("<f", 8.0)),
    }
    return Completion(
        prompt=Prompt(text=(_said("user", _SCENE),) if chat else _SCENE, metadata=metadata),
        text="",
        media=Payload(kind="media", arrays=arrays),
        truncated=truncated,
        num_units=4,
    )


def _judge(reward: Reward, completions: Sequence[Completion]) -> list[Any]:
    """Score completions, one after the other, on one event loop as in a worker; results and exceptions."""

    async def judge() -> list[Any]:
        found = list[Any]()
        for completion in completions:
            before = _contents(completion)
            try:
                outcome: Any = reward.score(completion)
                found.append(await outcome if inspect.isawaitable(outcome) else outcome)
            except Exception as error:  # noqa: BLE001 - any exception says that there is no score
                found.append(error)
            if _contents(completion) != before:
                fault(f"scoring changed the prompt, payload or media of {_shown(completion)}; work on a copy")
        return found

    return asyncio.run(judge())


def _contents(completion: Completion) -> bytes:
    return TO_WORKER.encode(Task(ticket=0, reward=0, completion=completion))


def _scores(reward: Reward, completions: Sequence[Completion]) -> list[Any]:
    """The scores of completions, each of which must get one."""
    found = _judge(reward, completions)
    for completion, outcome in zip(completions, found, strict=True):
        if isinstance(outcome, Exception):
            raised = f"{type(outcome).__name__}: {outcome}"
            fault(f"{_shown(completion)} must get a score, but scoring it raised {raised}")
    return found


def _value(outcome: Any) -> Any:
    return outcome.value if isinstance(outcome, Score) else outcome


def _goes_on_when_cancelled(reward: Reward, completions: Sequence[Completion]) -> bool:
    """Begin to score, cancel at the first wait, and tell whether it goes on all the same."""
    goes_on = False

    async def cancel() -> None:
        nonlocal goes_on
        outcome = next(filter(inspect.isawaitable, map(reward.score, completions)), None)
        if outcome is None:
            return
        task, goes_on = asyncio.ensure_future(outcome), True
        await asyncio.sleep(0)
        if is_cancelled := task.cancel():
            await asyncio.wait({task})
        goes_on = is_cancelled and not task.cancelled() and task.exception() is None

    # A coroutine that cannot be cancelled would hold up a loop of this thread for ever. What a score raises is told by
    # another test.
    wait([begin(lambda: asyncio.run(cancel()), "probe")], _PATIENCE_S)
    return goes_on
