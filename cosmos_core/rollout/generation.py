"""Leased prompts on their way through the engine: row, request, completion, reward, report."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Final

import attrs

from cosmos_core.config.order import group_seed
from cosmos_core.config.schema import Recipe
from cosmos_core.errors import DataError, EngineError
from cosmos_core.protocols import Algorithm, Dataset, Generated, Handle, Model, Request, RolloutEngine, Sampling
from cosmos_core.rollout import scoring
from cosmos_core.rollout.gate import VersionGate
from cosmos_core.rollout.reward_pool import Outcomes, RewardPool
from cosmos_core.rollout.supervised import SupervisedThread
from cosmos_core.transport.messages import GroupFailed, GroupFinished, Lease, Report
from cosmos_core.transport.payloads import PayloadServer
from cosmos_core.types import Group, Payload, Prompt


@attrs.frozen(kw_only=True, eq=False)
class Work:
    """One lease being worked on."""

    lease: Lease
    prompt: Prompt


@attrs.frozen(kw_only=True, eq=False)
class Parts:
    """What leased prompts pass through.

    Attributes:
        recipe: The run's recipe.
        stage: Index of the stage whose prompts are generated for.
        context_length: Units of the longest prompt and completion together.
        model: Encodes and decodes.
        dataset: Where rows come from.
        algorithm: Admits groups.
        engine: Generates.
        pool: Scores.
        payloads: Holds what was generated.
        gate: Keeps evaluations and updates apart.
        report: Tells the controller.
        takes_media: Whether the engine takes prompts that show images or videos.
    """

    recipe: Recipe
    stage: int
    context_length: int
    model: Model
    dataset: Dataset
    algorithm: Algorithm
    engine: RolloutEngine
    pool: RewardPool
    payloads: PayloadServer
    gate: VersionGate
    report: Callable[[Report], None]
    takes_media: bool = False


class Generation:
    """Keeps what is in flight equal to what is leased.

    `reconcile` is called on one thread; what follows a completion runs on a thread of its own, so that neither the
    engine nor the rewards wait for decoding and bookkeeping.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts: Final = parts
        self._lock: Final = threading.Lock()
        self._active: Final[dict[int, Work]] = {}
        self._reported: Final[set[int]] = set()
        self._events: Final[queue.SimpleQueue[Callable[[], None] | None]] = queue.SimpleQueue()
        self._thread: Final = SupervisedThread("groups", self._run)

    def start(self) -> None:
        """Begin to finish groups."""
        self._thread.start()

    def close(self) -> None:
        """Stop; what is not reported yet is forgotten."""
        self._events.put(None)
        self._thread.join(5.0)

    def check(self) -> None:
        """Raise ReplicaError if the thread failed."""
        self._thread.check()

    @property
    def num_active(self) -> int:
        """Leases being worked on."""
        return len(self._active)

    def reconcile(self, leases: Sequence[Lease], hold: Collection[int]) -> None:
        """Start what is leased and not known, abort what is not leased any more, release payloads nobody needs.

        An evaluation whose weights are not loaded is left for a later call.
        """
        wanted = {lease.lease for lease in leases}
        with self._lock:
            gone = self._active.keys() - wanted
            for lease in gone:
                del self._active[lease]
            self._reported.intersection_update(wanted)
            new = [each for each in leases if each.lease not in self._active and each.lease not in self._reported]
            self._parts.payloads.release_except(wanted.union(hold))
        if gone:
            self._parts.engine.abort([str(lease) for lease in gone])
        requests = [request for lease in new if (request := self._prepare(lease)) is not None]
        for handle in self._parts.engine.submit(requests) if requests else ():
            handle.add_done_callback(self._on_generated)

    # -- before generation --------------------------------------------------------------------------------------------

    def _too_long(self, units: int, *, is_evaluation: bool) -> str:
        """What so many units exceed; empty if they fit. What is trained on has to fit a micro-batch, too."""
        if units > self._parts.context_length:
            return f"units exceed the model's context length of {self._parts.context_length}"
        budget = self._parts.recipe.policy.micro_batch_units
        return "" if is_evaluation or units <= budget else f"units exceed policy.micro_batch_units of {budget}"

    def _prepare(self, lease: Lease) -> Request | None:
        """The request of a lease; None if it is to wait, or failed."""
        is_evaluation = lease.purpose == "evaluation"
        if is_evaluation and lease.version != self._parts.gate.loaded:
            return None
        try:
            prompt = self._parts.dataset.row("heldout" if is_evaluation else "train", lease.row)
            encoded = self._encode(lease.row, prompt)
        except (DataError, IndexError) as error:
            self._fail(lease, "bad_row", str(error))
            return None
        sampling = self._sampling(is_evaluation=is_evaluation)
        size = encoded.arrays["prompt"].shape[0] if "prompt" in encoded.arrays else 0
        too_long = self._too_long(size + sampling.max_units, is_evaluation=is_evaluation)
        if too_long:
            detail = f"row {lease.row}: a prompt of {size} and a completion of up to {sampling.max_units} {too_long}"
            self._fail(lease, "prompt_too_long", detail)
            return None
        if is_evaluation and not self._parts.gate.enter(lease.version):
            return None
        with self._lock:
            self._active[lease.lease] = Work(lease=lease, prompt=prompt)
        seed = 0 if is_evaluation else group_seed(self._parts.recipe.run.seed, self._parts.stage, lease.position)
        # Evaluations go first: the controller holds back new weights for them.
        priority = 0 if is_evaluation else 1
        return Request(request_id=str(lease.lease), prompt=encoded, sampling=sampling, seed=seed, priority=priority)

    def _encode(self, row: int, prompt: Prompt) -> Payload:
        if prompt.media and not self._parts.takes_media:
            raise DataError(f"row {row}: it shows images or videos, which the engine does not take")
        encoded = self._parts.model.encode(prompt)
        if "prompt" in encoded.arrays and not encoded.arrays["prompt"].shape[0]:
            raise DataError(f"row {row}: the prompt is empty; it needs one unit at least")
        return encoded

    def _sampling(self, *, is_evaluation: bool) -> Sampling:
        config = self._parts.recipe.rollout.sampling
        if is_evaluation:
            return Sampling(temperature=0.0, max_units=self._parts.recipe.evaluation.max_units or config.max_units)
        return Sampling(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            max_units=config.max_units,
            num_samples=self._parts.recipe.rollout.group_size,
        )

    def _fail(self, lease: Lease, reason: str, detail: str) -> None:
        with self._lock:
            self._reported.add(lease.lease)
            self._parts.report(GroupFailed(lease=lease.lease, reason=reason, detail=detail))

    # -- after generation ---------------------------------------------------------------------------------------------

    def _on_generated(self, handle: Handle) -> None:
        self._events.put(functools.partial(self._score, handle))

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            event()

    def _score(self, handle: Handle) -> None:
        lease = int(handle.request.request_id)
        if handle.request.sampling.temperature == 0:
            self._parts.gate.leave()
        try:
            generated = handle.result(0)
        except EngineError:
            return  # the engine as a whole failed: its health() says so
        with self._lock:
            work = self._active.get(lease)
        if work is None:
            return
        texts = [self._parts.model.decode(each.payload) for each in generated]
        completions = [scoring.to_score(work.prompt, *pair) for pair in zip(generated, texts, strict=True)]
        done = functools.partial(self._on_scored, work, generated, texts)
        self._parts.pool.submit(completions, done)

    def _on_scored(self, work: Work, generated: list[Generated], texts: list[str], outcomes: Outcomes) -> None:
        self._events.put(functools.partial(self._finish, work, generated, texts, outcomes))

    def _finish(self, work: Work, generated: list[Generated], texts: list[str], outcomes: Outcomes) -> None:
        lease, is_train = work.lease, work.lease.purpose == "train"
        rewards = self._parts.recipe.reward
        samples = tuple(
            scoring.sample(index, made, scored, rewards)
            for index, (made, scored) in enumerate(zip(generated, outcomes, strict=True))
        )
        group = Group(position=lease.position, samples=samples)
        drop = (self._parts.algorithm.admit(group) or "") if is_train else ""
        reports = tuple(
            scoring.report(sample, None if is_train and sample.index else text)
            for sample, text in zip(samples, texts, strict=True)
        )
        with self._lock:
            if self._active.pop(lease.lease, None) is None:
                return
            self._reported.add(lease.lease)
            if is_train and not drop:
                self._parts.payloads.put(lease.lease, [each.payload for each in generated])
            self._parts.report(GroupFinished(lease=lease.lease, samples=reports, drop=drop))
