"""Scores ordinary completions and pictures with a reward, in this process or in a worker as a run does."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import inspect
import queue
import struct
import threading
from collections.abc import Sequence
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from cosmos_core.config.schema import RewardConfig
from cosmos_core.protocols import Completion, Reward, Score
from cosmos_core.rollout.rewards.messages import Outcomes, WirePayload
from cosmos_core.rollout.rewards.pool import RewardPool
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.testing.conformance.worker import Answer, check_pool
from cosmos_core.types import JSON, Array, Message, Payload, Prompt, SampleStatus

_QUESTION: Final = "Ann has 7 apples, buys 5 more, then loses 4. How many apples now?"
_CHAT: Final = (Message(role="system", content="Be brief."), Message(role="user", content=_QUESTION))


def ordinary_completions() -> tuple[Completion, ...]:
    """Right, wrong, empty, truncated, garbled and endless answers to a question with a reference, and a dialogue."""
    return (
        _completion("7+5=12\n12-4=8\n#### 8"),
        _completion("7+5=12\n#### 12"),
        _completion("The answer is 8."),
        _completion(""),
        _completion(" \n\t\n"),
        _completion("Ответ — 8 ✅, 世界 🧮, e\u0301, \u200b٨"),
        _completion('{"answer": [8, "\\boxed{8 \\frac{ $ ]}'),
        _completion("\x00\x1b[31m8\x7f"),
        _completion("#### " + "9" * 5000, truncated=True),
        _completion("7+5=12 and " * 1000, truncated=True),
        _completion("7+5=1", truncated=True),
        Completion(prompt=Prompt(text=_CHAT, reference="8"), text="#### 8", turns=(_own("#### 8"),), num_units=7),
        _dialogue(_own("calc: 7+5-4="), Message(role="tool", content="8\n"), _own("#### 9")),
    )


def shown(completion: Completion) -> str:
    """A completion in a message."""
    text = completion.text if len(completion.text) <= 60 else f"{completion.text[:50]}… ({len(completion.text)} long)"
    payload = "" if completion.payload is None else f", a payload of {completion.payload.kind}"
    media = "" if completion.media is None else f", frames {list(completion.media.arrays['frames'].shape)}"
    cut = ", truncated" if completion.truncated else ""
    return f"the completion {text!r} (reference {completion.prompt.reference!r:.60}{payload}{media}{cut})"


def _completion(text: str, *, truncated: bool = False) -> Completion:
    metadata: dict[str, JSON] = {"source": "conformance kit", "tags": ["arithmetic", "kit"], "steps": {"number": 2}}
    prompt = Prompt(text=_QUESTION, reference="8", metadata=metadata)
    return Completion(prompt=prompt, text=text, truncated=truncated, turns=(_own(text),), num_units=len(text) + 1)


def _dialogue(*turns: Message) -> Completion:
    """A dialogue whose text has what a tool says."""
    return Completion(
        prompt=Prompt(text=_QUESTION, reference="8"),
        text="".join(turn.content for turn in turns),
        turns=turns,
        num_units=sum(len(turn.content) for turn in turns if turn.role == "assistant"),
    )


def _own(text: str) -> Message:
    return Message(role="assistant", content=text)


_PATIENCE_S: Final = 5.0


@attrs.frozen(kw_only=True, eq=False)
class Judged:
    """A completion, and what scoring it did.

    Attributes:
        completion: What was scored.
        outcome: What `score` returned, its coroutine returned, or either raised.
        awaited: Whether `score` returned a coroutine.
        changed: Whether the prompt, the payload or the media are others since.
    """

    completion: Completion
    outcome: Any
    awaited: bool
    changed: bool

    @property
    def value(self) -> Any:
        """The number, or what was returned instead."""
        return self.outcome.value if isinstance(self.outcome, Score) else self.outcome


def judge(reward: Reward, completions: Sequence[Completion]) -> list[Judged]:
    """Score completions one after the other, on one event loop as in a worker."""

    async def judge_all() -> list[Judged]:
        return [await _judge(reward, each) for each in completions]

    return asyncio.run(judge_all())


def judge_all_sound(reward: Reward, completions: Sequence[Completion]) -> list[Judged]:
    """Score completions, each of which must get a score."""
    found = judge(reward, completions)
    for each in found:
        if isinstance(each.outcome, Exception):
            raised = f"{type(each.outcome).__name__}: {each.outcome}"
            fault(f"{shown(each.completion)} must get a score, but scoring it raised {raised}")
    return found


async def _judge(reward: Reward, completion: Completion) -> Judged:
    before, awaited = _contents(completion), False
    try:
        outcome: Any = reward.score(completion)
        awaited = inspect.isawaitable(outcome)
        if awaited:
            outcome = await outcome
    except Exception as error:  # noqa: BLE001 - any exception says that there is no score
        outcome = error
    return Judged(completion=completion, outcome=outcome, awaited=awaited, changed=_contents(completion) != before)


def _contents(completion: Completion) -> Any:
    payloads = [None if each is None else WirePayload.of(each) for each in (completion.payload, completion.media)]
    return copy.deepcopy((completion.prompt, completion.text, payloads))


def goes_on_when_cancelled(reward: Reward, completion: Completion) -> bool:
    """Begin to score, cancel at the first wait, and tell whether it goes on all the same."""
    answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
    # A coroutine that cannot be cancelled would hold up a loop of this thread for ever.
    run = threading.Thread(target=lambda: answers.put(asyncio.run(_goes_on(reward, completion))), daemon=True)
    run.start()
    try:
        return answers.get(timeout=_PATIENCE_S)
    except queue.Empty:
        return True


async def _goes_on(reward: Reward, completion: Completion) -> bool:
    outcome = reward.score(completion)
    if not inspect.isawaitable(outcome):
        return False
    task = asyncio.ensure_future(outcome)
    await asyncio.sleep(0)
    if not task.cancel():
        return False
    await asyncio.wait({task})
    return not task.cancelled() and task.exception() is None


_HEIGHT, _WIDTH = 24, 40
_PROMPT = 'a red ball rolls past a sign that says "GO"'
_PICTURE_CHAT = (Message(role="user", content=_PROMPT),)


def ordinary_pictures() -> tuple[Completion, ...]:
    """Videos that move, stand still, are black, white, noise or of other shapes, of a prompt that names a colour."""
    draw = np.random.default_rng(0)
    noise = draw.integers(0, 256, (3, _HEIGHT, _WIDTH, 3), np.uint8)
    ball = np.zeros((4, _HEIGHT, _WIDTH, 3), np.uint8)
    for index, frame in enumerate(ball):
        frame[8:16, 4 + 6 * index : 12 + 6 * index] = (255, 0, 0)
    return (
        shown_as(ball),
        shown_as(ball[::-1]),
        shown_as(noise),
        shown_as(np.zeros_like(ball)),
        shown_as(np.full_like(ball, 255)),
        shown_as(np.repeat(noise[:1], 9, axis=0)),
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
        prompt=Prompt(text=_PICTURE_CHAT if chat else _PROMPT, metadata=metadata),
        text="",
        media=Payload(kind="media", arrays=arrays),
        truncated=truncated,
        num_units=4,
    )


_CHECK_S: Final = 0.2


def score_in_worker(reward: RewardConfig, completions: Sequence[Completion], seed: int) -> list[Answer | None]:
    """Score completions in a worker process, until all are scored or one takes too long.

    Args:
        reward: The reward as a recipe has it.
        completions: What to score.
        seed: `run.seed`.
    """
    answers: queue.SimpleQueue[tuple[int, Outcomes]] = queue.SimpleQueue()
    found: dict[int, Answer] = {}

    def answer(index: int, outcomes: Outcomes) -> None:
        answers.put((index, outcomes))

    with contextlib.closing(RewardPool([reward], num_workers=1, seed=seed)) as pool:
        pool.start()
        for index, completion in enumerate(completions):
            pool.submit([completion], functools.partial(answer, index))
        # What hangs once may hang at every completion, and each would take its time.
        while len(found) < len(completions) and not any(each.timed_out for each in found.values()):
            try:
                index, ((outcome,),) = answers.get(timeout=_CHECK_S)
            except queue.Empty:
                check_pool(pool, "reward")
                continue
            failure = "" if outcome.value is not None else outcome.detail or outcome.status
            timed_out = outcome.status is SampleStatus.REWARD_TIMEOUT
            found[index] = Answer(said=(outcome.value,), failure=failure, timed_out=timed_out)
    return [found.get(index) for index in range(len(completions))]
