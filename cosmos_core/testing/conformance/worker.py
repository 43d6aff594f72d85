"""The part of the kit that rewards and environments share: a run has both in workers."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar, Final, TypeAlias

import attrs
import pytest

from cosmos_core.errors import CosmosError
from cosmos_core.rollout.workers.pool import WorkerPool
from cosmos_core.testing.conformance.plugin import PluginConformance, fault, needs
from cosmos_core.testing.conformance.processes import marked
from cosmos_core.types import JSON

Ask: TypeAlias = Callable[..., tuple[Any, Any]]
"""`ask(method, *arguments)` calls a method of the pool whose last argument is what to call with the reply; returns the
reply, and what the method returned."""

GARBLED: Final = (
    "",
    " \n\t\n",
    "Ответ — 8 ✅, 世界 🧮, e\u0301, \u200b٨",
    '{"answer": [8, "\\boxed{8 \\frac{ $ ]}',
    "\x00\x1b[31m8\x7f",
)
"""Texts of a model that has not learned yet."""
ENDLESS: Final = ("#### " + "9" * 5000, "7+5=12 and " * 1000)
METADATA: Final[dict[str, JSON]] = {"source": "conformance kit", "tags": ["arithmetic", "kit"], "steps": {"number": 2}}
_SHOWN: Final = 3
_CHECK_S: Final = 0.2


@attrs.frozen(kw_only=True)
class Answer:
    """A worker's answer to a completion or a dialogue, or why there is none."""

    said: tuple[Any, ...] = ()
    failure: str = ""
    timed_out: bool = False


@attrs.frozen(kw_only=True)
class WorkerRun:
    """A worker's answers, None for what was not waited for after a timeout, and the processes that outlived it."""

    answers: tuple[Answer | None, ...]
    leftovers: tuple[str, ...]


def _listed(what: str, items: Sequence[str]) -> str:
    more = [f"and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
    return "\n  ".join([f"{what}:", *items[:_SHOWN], *more])


class WorkerConformance(PluginConformance):
    """Tests of what is run in workers: an answer to whatever a model writes, in time, and no process left behind.

    The class of each kind sets the words of its messages, and says how inputs are shown and given to a worker.
    """

    timeout_s: ClassVar[float] = 10.0
    at_once: ClassVar[bool] = False
    inputs: ClassVar[str]
    inputs_failed: ClassVar[str]
    purity: ClassVar[str]

    @staticmethod
    def shown(given: Any) -> str:
        """An input in a message."""
        raise NotImplementedError

    def pool(self, options: Mapping[str, JSON], seed: int) -> WorkerPool[Any]:
        """Workers of the plugin, not started."""
        raise NotImplementedError

    def answer(self, ask: Ask, pool: Any, seed: int, given: Any) -> Answer:
        """The answer of a worker to an input."""
        raise NotImplementedError

    def answers(
        self, options: Mapping[str, JSON], seed: int, inputs: Sequence[Any], *, at_once: bool
    ) -> list[Answer | None]:
        """The answers of workers: to one input after the other or all beside each other, until one takes too long."""
        late = threading.Event()

        def ask(method: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
            reply: Future[Any] = Future()
            returned = method(*arguments, reply.set_result)
            # What hangs once may hang at every input, and each would take its time.
            while not late.is_set():
                with contextlib.suppress(TimeoutError):
                    return reply.result(_CHECK_S), returned
                try:
                    pool.check()
                except CosmosError as error:
                    fault(f"a worker process could not load the {self.kind}: {error}")
            raise TimeoutError

        def answer(given: Any) -> Answer | None:
            try:
                found = self.answer(ask, pool, seed, given)
            except TimeoutError:
                return None
            if found.timed_out:
                late.set()
            return found

        num_threads = len(inputs) if at_once and inputs else 1
        with contextlib.closing(self.pool(options, seed)) as pool, ThreadPoolExecutor(num_threads) as threads:
            pool.start()
            return [*threads.map(answer, inputs)]

    @pytest.fixture
    def ordinary(self, request: pytest.FixtureRequest) -> Sequence[Any]:
        """The ordinary inputs, all of which must get an answer."""
        return tuple(request.getfixturevalue(self.inputs))

    @pytest.fixture
    def in_worker(self, options: Mapping[str, JSON], context: Any) -> Callable[..., WorkerRun]:
        """`in_worker(inputs, hash_seed="1")`: have them answered in a worker, as a run does."""

        def run(inputs: Sequence[Any], *, hash_seed: str = "0", at_once: bool = self.at_once) -> WorkerRun:
            with marked(hash_seed) as leftovers:
                answers = self.answers(options, context.seed, inputs, at_once=at_once)
            return WorkerRun(answers=tuple(answers), leftovers=tuple(leftovers))

        return run

    @pytest.fixture(scope="class")
    @classmethod
    def earlier(cls) -> dict[str, WorkerRun]:
        """Earlier results, by what was answered with which options: answers may be dear."""
        return {}

    @pytest.fixture
    def worker_run(
        self,
        earlier: dict[str, WorkerRun],
        options: Mapping[str, JSON],
        in_worker: Callable[..., WorkerRun],
        ordinary: Sequence[Any],
    ) -> WorkerRun:
        """The results of a worker for the ordinary inputs."""
        key = repr((options, [self.shown(each) for each in ordinary]))
        if key not in earlier:
            earlier[key] = in_worker(ordinary)
        return earlier[key]

    @pytest.fixture
    def sound_run(self, worker_run: WorkerRun) -> WorkerRun:
        """The same, if every input got an answer and nothing is left."""
        if worker_run.leftovers or any(each is None or each.failure for each in worker_run.answers):
            pytest.skip("a worker failed at ordinary inputs; the faults of another test say how")
        return worker_run

    def test_every_ordinary_input_is_answered_in_time(self, worker_run: WorkerRun, ordinary: Sequence[Any]) -> None:
        """A wrong, empty or garbled input gets an answer too; a worker that hangs is ended, and nothing outlives it."""
        errors, late = list[str](), list[str]()
        for given, answer in zip(ordinary, worker_run.answers, strict=True):
            if answer is not None and answer.timed_out:
                late.append(self.shown(given))
            elif answer is not None and answer.failure:
                errors.append(f"{self.shown(given)}: {answer.failure}")
        if errors:
            fault(_listed(f"{len(errors)} of {len(ordinary)} ordinary {self.inputs_failed}", errors))
        if late:
            fault(
                f"{late[0]} got no answer within {self.timeout_s:g} s; be quicker, "
                "or set `timeout_s` of the test class to what recipes must give it"
            )
        if worker_run.leftovers:
            fault(_listed("it starts processes that outlive the worker; wait for their end", worker_run.leftovers))

    def test_another_process_gives_the_same_answers(
        self, capabilities: Any, sound_run: WorkerRun, in_worker: Callable[..., WorkerRun], ordinary: Sequence[Any]
    ) -> None:
        """Each replica has workers of its own: it matters neither which of them is asked, nor what was asked before."""
        needs(capabilities.deterministic, "deterministic")
        # Each comes again, after others.
        order = random.Random(0).sample(range(len(ordinary)), len(ordinary)) * 2  # noqa: S311 - no secret
        other = in_worker([ordinary[index] for index in order], hash_seed="1")
        for index, answer in zip(order, other.answers, strict=True):
            both = (sound_run.answers[index], answer)
            if both[0] != both[1]:
                seen = " and ".join(f"{each and (each.failure or each.said)!r:.200}" for each in both)
                fault(
                    f"{self.shown(ordinary[index])} got {seen}: in one process, and in another with another hash seed, "
                    f"in another order; {self.purity}, or declare "
                    f"{self.kind.capitalize()}Capabilities(deterministic=False)"
                )
