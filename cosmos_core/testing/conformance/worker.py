"""The part of the kit that rewards and environments share: a run has both in workers."""

from __future__ import annotations

import contextlib
import queue
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, TypeVar

import attrs
import pytest

from cosmos_core.errors import CosmosError
from cosmos_core.protocols import Kind
from cosmos_core.rollout.workers.pool import WorkerPool
from cosmos_core.testing.conformance.plugin import PluginConformance, fault, needs
from cosmos_core.testing.conformance.processes import marked
from cosmos_core.types import JSON

T = TypeVar("T")

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


def next_of(answers: queue.SimpleQueue[T], pool: WorkerPool[Any], kind: Kind) -> T:
    """The next answer of a pool's workers; faults the plugin if they cannot go on."""
    while True:
        with contextlib.suppress(queue.Empty):
            return answers.get(timeout=_CHECK_S)
        try:
            pool.check()
        except CosmosError as error:
            fault(f"a worker process could not load the {kind}: {error}")


def _listed(what: str, items: Sequence[str]) -> str:
    more = [f"and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
    return "\n  ".join([f"{what}:", *items[:_SHOWN], *more])


class WorkerConformance(PluginConformance):
    """Tests of what is run in workers: an answer to whatever a model writes, in time, and no process left behind.

    The class of each kind sets the words of its messages, and says how inputs are shown and given to a worker.
    """

    timeout_s: ClassVar[float] = 10.0
    inputs_failed: ClassVar[str]
    purity: ClassVar[str]

    @staticmethod
    def shown(given: Any) -> str:
        """An input in a message."""
        raise NotImplementedError

    def answers(
        self, options: Mapping[str, JSON], seed: int, inputs: Sequence[Any], *, at_once: bool
    ) -> list[Answer | None]:
        """The answers of workers, which are ended before this returns: one input after the other, or all in turns."""
        raise NotImplementedError

    @pytest.fixture
    def ordinary(self) -> Sequence[Any]:
        """The ordinary inputs, all of which must get an answer."""
        raise NotImplementedError

    @pytest.fixture
    def in_worker(self, options: Mapping[str, JSON], context: Any) -> Callable[..., WorkerRun]:
        """`in_worker(inputs, hash_seed="1")`: have them answered in a worker, as a run does."""

        def run(inputs: Sequence[Any], *, hash_seed: str = "0", at_once: bool = False) -> WorkerRun:
            with marked(hash_seed) as leftovers:
                answers = self.answers(options, context.seed, inputs, at_once=at_once)
            return WorkerRun(answers=tuple(answers), leftovers=tuple(leftovers))

        return run

    @pytest.fixture(scope="class")
    @classmethod
    def earlier(cls) -> dict[object, Any]:
        """Earlier results, by what was answered with which options: answers may be dear."""
        return {}

    @pytest.fixture
    def key(self, options: Mapping[str, JSON], ordinary: Sequence[Any]) -> str:
        """The options and the ordinary inputs as a key."""
        return repr((options, [self.shown(each) for each in ordinary]))

    @pytest.fixture
    def worker_run(
        self, earlier: dict[object, Any], key: str, in_worker: Callable[..., WorkerRun], ordinary: Sequence[Any]
    ) -> WorkerRun:
        """The results of a worker for the ordinary inputs."""
        if key not in earlier:
            earlier[key] = in_worker(ordinary)
        run: WorkerRun = earlier[key]
        return run

    @pytest.fixture
    def sound_run(self, worker_run: WorkerRun) -> WorkerRun:
        """The same, if every input got an answer and nothing is left."""
        if worker_run.leftovers or any(each is None or each.failure for each in worker_run.answers):
            pytest.skip("a worker failed at ordinary inputs; the faults of another test say how")
        return worker_run

    def test_every_ordinary_input_is_answered_in_time(self, worker_run: WorkerRun, ordinary: Sequence[Any]) -> None:
        """What is wrong, empty or garbled gets an answer too; a worker that hangs is ended, and nothing outlives it."""
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
        """Each replica has workers of its own, and an answer must not depend on which of them gave it."""
        needs(capabilities.deterministic, "deterministic")
        order = random.Random(0).sample(range(len(ordinary)), len(ordinary))  # noqa: S311 - no secret
        other = in_worker([ordinary[index] for index in order], hash_seed="1")
        for index, answer in zip(order, other.answers, strict=True):
            both = (sound_run.answers[index], answer)
            if both[0] != both[1]:
                seen = [each and (each.failure or each.said) for each in both]
                self.fault_differing(ordinary[index], seen, "in one process, and in another with another hash seed")

    def fault_differing(self, given: Any, seen: Sequence[Any], where: str) -> None:
        """Tell of an input that got different answers."""
        fault(
            f"{self.shown(given)} got {' and '.join(f'{each!r:.200}' for each in seen)}: {where}; {self.purity}, or "
            f"declare {self.kind.capitalize()}Capabilities(deterministic=False)"
        )
