"""Takes leased prompts through the engine: row, request, completion, reward, report."""

from __future__ import annotations

import contextlib
import functools
import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import attrs

from cosmos_core.config.loading import recipe_with
from cosmos_core.config.order import evaluation_seed, group_seed
from cosmos_core.config.schema import Recipe
from cosmos_core.errors import DataError, EngineError
from cosmos_core.plugins.recipe import greedy, sampled
from cosmos_core.protocols import (
    Algorithm,
    Dataset,
    EnvironmentCapabilities,
    Generated,
    Handle,
    Model,
    Request,
    RolloutEngine,
    Sampling,
)
from cosmos_core.rollout.episodes.agents import Agents
from cosmos_core.rollout.episodes.dialogue import EpisodeResult
from cosmos_core.rollout.episodes.player import Player, player_of, sees_turns, serving
from cosmos_core.rollout.episodes.pool import EnvironmentPool
from cosmos_core.rollout.media import MediaWriter
from cosmos_core.rollout.rewards import scoring
from cosmos_core.rollout.rewards.messages import Outcomes
from cosmos_core.rollout.rewards.pool import RewardPool
from cosmos_core.rollout.samples import rows_of
from cosmos_core.rollout.version_lock import VersionLock
from cosmos_core.storage.parts import PartWriter
from cosmos_core.threads import SupervisedThread
from cosmos_core.transport.directives import Lease
from cosmos_core.transport.payloads import PayloadServer
from cosmos_core.transport.reports import GroupFailed, Report
from cosmos_core.types import Group, Payload, Prompt, Scalar

_KEPT: Final = 16


@attrs.frozen(kw_only=True, eq=False)
class Work:
    """One lease being worked on."""

    lease: Lease
    prompt: Prompt


@attrs.frozen(kw_only=True, eq=False)
class GenerationParts:
    """The parts of a replica that leased prompts pass through.

    `stage` is the index of the stage whose prompts are generated for, and `context_length` counts units of the longest
    prompt and completion together. `samples` keeps all samples, and `media_writer` the media of held-out ones; None
    where they are not kept. `takes_media` says whether the engine takes prompts that show images or videos.
    Environments answer the model's turns; None where a completion is one turn.
    """

    recipe: Recipe
    stage: int
    context_length: int
    model: Model
    dataset: Dataset
    recipes: LeaseRecipes
    engine: RolloutEngine
    pool: RewardPool
    payloads: PayloadServer
    version_lock: VersionLock
    report: Callable[[Report], None]
    samples: PartWriter | None = None
    media_writer: MediaWriter | None = None
    takes_media: bool = False
    environments: EnvironmentPool | None = None
    environment: EnvironmentCapabilities = attrs.field(factory=EnvironmentCapabilities)


class Generation:
    """Keeps what is in flight equal to what is leased.

    `reconcile` is called on one thread; what follows a completion runs on a thread of its own, so that neither the
    engine nor the rewards wait for decoding and bookkeeping.

    Attributes:
        num_ended: Prompts that were finished.
    """

    def __init__(self, parts: GenerationParts) -> None:
        self._parts: Final = parts
        self._lock: Final = threading.Lock()
        self._active: Final[dict[int, Work]] = {}
        self._reported: Final[set[int]] = set()
        self._scoring: Final[set[int]] = set()
        self._awaited_s, self._awaits_since = 0.0, math.inf
        self._events: Final[queue.SimpleQueue[Callable[[], None] | None]] = queue.SimpleQueue()
        self._thread: Final = SupervisedThread("groups", self._run)
        self.num_ended = 0
        self._endpoint: Final = contextlib.ExitStack()
        self._check_endpoint: Callable[[], None] = lambda: None
        self._episodes: Final = self._make_episodes()

    def _make_episodes(self) -> Player | None:
        parts = self._parts
        if parts.environments is None or parts.recipe.environment is None:
            return None
        return player_of(
            parts.recipe.environment,
            parts.environment,
            name=parts.recipe.run.name,
            model=parts.model,
            engine=parts.engine,
            pool=parts.environments,
            version=lambda: parts.version_lock.loaded,
            post=self._events.put,
            sees=sees_turns(parts.model, takes_media=parts.takes_media),
        )

    @property
    def counts(self) -> Mapping[str, float]:
        """Counts of what happened with agents, for gauges."""
        return self._episodes.counts if isinstance(self._episodes, Agents) else {}

    def start(self) -> None:
        """Begin to finish groups, and to answer agents.

        Raises:
            ReplicaError: Their endpoint cannot listen.
        """
        self._check_endpoint = self._endpoint.enter_context(serving(self._episodes))
        self._thread.start()

    def close(self) -> None:
        """Stop, and write the samples that wait; what is not reported yet is forgotten. Idempotent."""
        self._endpoint.close()
        self._events.put(None)
        self._thread.join(5.0)
        if self._parts.samples is not None:
            self._parts.samples.close()

    def check(self) -> None:
        """Raise ReplicaError if a thread failed."""
        self._thread.check()
        self._check_endpoint()

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
            ended = [self._active.pop(lease) for lease in self._active.keys() - wanted]
            self._look_for_scores()
            self._reported.intersection_update(wanted)
            new = [each for each in leases if each.lease not in self._active and each.lease not in self._reported]
            self._parts.payloads.release_except(wanted.union(hold))
        self._abort(ended)
        self._submit([request for lease in new if (request := self._prepare(lease)) is not None])

    def _submit(self, requests: Sequence[Request]) -> None:
        if self._episodes is None:
            for handle in self._handles(requests) if requests else ():
                handle.add_done_callback(lambda handle: self._events.put(functools.partial(self._take, handle)))
            return
        for request in requests:
            work = self._active[int(request.request_id)]
            longest = self._parts.context_length
            if work.lease.purpose != "evaluation":
                longest = min(longest, self._parts.recipe.policy.micro_batch_units)
            self._events.put(
                functools.partial(
                    self._episodes.begin,
                    request,
                    work.prompt,
                    longest=longest,
                    done=functools.partial(self._score, work.lease),
                )
            )

    def _handles(self, requests: Sequence[Request]) -> Sequence[Handle]:
        """Have the engine take requests; one that has no room in its cache fails alone."""
        try:
            return self._parts.engine.submit(requests)
        except EngineError as error:
            self._parts.engine.health()
            if len(requests) > 1:
                return [handle for request in requests for handle in self._handles([request])]
            with self._lock:
                lease = self._active.pop(int(requests[0].request_id)).lease
            if lease.purpose == "evaluation":
                self._parts.version_lock.leave()
            self._fail(lease, "prompt_too_long", f"row {lease.row}: {error}")
            return ()

    def _abort(self, works: Sequence[Work]) -> None:
        if self._episodes is not None:
            for work in works:
                self._events.put(functools.partial(self._abandon, self._episodes, work.lease))
        elif works:
            self._parts.engine.abort([str(work.lease.lease) for work in works])

    # -- before generation --------------------------------------------------------------------------------------------

    def _unfit(self, encoded: Payload, sampling: Sampling, *, is_evaluation: bool) -> tuple[str, str]:
        """The reason why a prompt is not generated for, as a code and in words; both empty where it is.

        What is denoised has no length: its steps see one another's results alone, and micro-batches split them. What is
        trained on has to fit a micro-batch, too.
        """
        if encoded.kind == "latents":
            return "", ""
        size = encoded.arrays["prompt"].shape[0] if "prompt" in encoded.arrays else 0
        unfit, why = self._parts.recipe.dataset.unfit(size) if not is_evaluation else ("", "")
        if unfit:
            return unfit, why
        limits = [("the model's context length", self._parts.context_length)]
        limits += [] if is_evaluation else [("policy.micro_batch_units", self._parts.recipe.policy.micro_batch_units)]
        exceeded = next((f"{name} of {most}" for name, most in limits if size + sampling.max_units > most), "")
        why = f"a prompt of {size} and a completion of up to {sampling.max_units} units exceed {exceeded}"
        return ("prompt_too_long", why) if exceeded else ("", "")

    def _prepare(self, lease: Lease) -> Request | None:
        """The request of a lease; None if it is to wait, or failed."""
        is_evaluation = lease.purpose == "evaluation"
        if is_evaluation and lease.version != self._parts.version_lock.loaded:
            return None
        try:
            prompt = self._parts.dataset.row("heldout" if is_evaluation else "train", lease.row)
            encoded = self._encode(lease.row, prompt)
        except (DataError, IndexError) as error:
            self._fail(lease, "bad_row", str(error))
            return None
        recipe = self._parts.recipes.of(lease.settings).recipe
        sampling = greedy(recipe) if is_evaluation else sampled(recipe)
        reason, why = self._unfit(encoded, sampling, is_evaluation=is_evaluation)
        if reason:
            self._fail(lease, reason, f"row {lease.row}: {why}")
            return None
        if is_evaluation and not self._parts.version_lock.enter(lease.version):
            return None
        with self._lock:
            self._active[lease.lease] = Work(lease=lease, prompt=prompt)
            self._look_for_scores()
        # Evaluations go first: the controller holds back new weights for them.
        priority = 0 if is_evaluation else 1
        return Request(
            request_id=str(lease.lease), prompt=encoded, sampling=sampling, seed=self._seed(lease), priority=priority
        )

    def _seed(self, lease: Lease) -> int:
        run_seed = self._parts.recipe.run.seed
        if lease.purpose == "evaluation":
            return evaluation_seed(run_seed, lease.row)
        return group_seed(run_seed, self._parts.stage, lease.position)

    def _encode(self, row: int, prompt: Prompt) -> Payload:
        if prompt.shows_media and self._episodes is not None and not self._episodes.sees:
            raise DataError(f"row {row}: it shows images or videos, and the dialogues of this model are of text")
        if prompt.shows_media and not self._parts.takes_media:
            raise DataError(f"row {row}: it shows images or videos, which the engine does not take")
        encoded = self._parts.model.encode(prompt)
        if "prompt" in encoded.arrays and not encoded.arrays["prompt"].shape[0]:
            raise DataError(f"row {row}: the prompt is empty; it needs one unit at least")
        return encoded

    def _fail(self, lease: Lease, reason: str, detail: str) -> None:
        with self._lock:
            self._reported.add(lease.lease)
            self._parts.report(GroupFailed(lease=lease.lease, reason=reason, detail=detail))

    # -- after generation ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            event()

    def _take(self, handle: Handle) -> None:
        lease = int(handle.request.request_id)
        if handle.request.sampling.temperature == 0:
            self._parts.version_lock.leave()
        try:
            generated = handle.result(0)
        except EngineError:
            return  # the engine as a whole failed: its health() says so
        self._score_active(lease, [EpisodeResult.single(each) for each in generated])

    def _score(self, lease: Lease, played: list[EpisodeResult]) -> None:
        """The dialogues of a lease are over."""
        if lease.purpose == "evaluation":
            self._parts.version_lock.leave()
        self._score_active(lease.lease, played)

    def _abandon(self, episodes: Player, lease: Lease) -> None:
        if episodes.abandon(str(lease.lease)) and lease.purpose == "evaluation":
            self._parts.version_lock.leave()

    def _score_active(self, lease: int, played: list[EpisodeResult]) -> None:
        with self._lock:
            work = self._active.get(lease)
            self._look_for_scores(lease)
        if work is None:
            return
        decode = self._parts.model.decode
        texts = [decode(each.generated.payload) if each.text is None else each.text for each in played]
        # What failed on its way has no score.
        whole = [pair for pair in zip(played, texts, strict=True) if pair[0].status.is_scored]
        completions = [scoring.to_score(work.prompt, *pair) for pair in whole]
        finish = functools.partial(self._finish, work, played, texts)
        self._parts.pool.submit(completions, lambda outcomes: self._events.put(functools.partial(finish, outcomes)))

    def _look_for_scores(self, *scoring: int) -> None:
        """Count the time since the last such call if all that is in flight waited for scores; called under the lock."""
        now = time.monotonic()
        self._awaited_s += max(0.0, now - self._awaits_since)
        self._scoring.update(scoring)
        self._scoring.intersection_update(self._active)
        self._awaits_since = now if 0 < len(self._scoring) == len(self._active) else math.inf

    def _finish(self, work: Work, played: list[EpisodeResult], texts: list[str], outcomes: Outcomes) -> None:
        lease, recipe, is_train = work.lease, self._parts.recipe, work.lease.purpose == "train"
        scores = iter(outcomes)
        scored = [(each, next(scores) if each.status.is_scored else ()) for each in played]
        samples = tuple(
            scoring.sample(index, *each, recipe.reward, recipe.environment) for index, each in enumerate(scored)
        )
        group = Group(position=lease.position, samples=samples)
        drop = (self._parts.recipes.of(lease.settings).algorithm.admit(group) or "") if is_train else ""
        media = self._kept(lease, played[0].generated)
        # What is no text is told by its prompt.
        text = texts[0] if played[0].generated.payload.kind == "tokens" else work.prompt.words
        told = scoring.report(lease.lease, samples, text, drop=drop, media=media)
        busy_s, scoring_s = self._parts.engine.stats().busy_s, self._parts.pool.scoring_s
        with self._lock:
            if self._active.pop(lease.lease, None) is None:
                return
            self._look_for_scores()
            awaited_s, self._awaited_s = self._awaited_s, 0.0
            self.num_ended += 1
            self._reported.add(lease.lease)
            if is_train and not drop:
                self._parts.payloads.put(lease.lease, [scoring.trained(*each, recipe.reward) for each in scored])
            self._parts.report(attrs.evolve(told, busy_s=busy_s, scoring_s=scoring_s, awaited_s=awaited_s))
        if (writer := self._parts.samples) is not None:
            more = {"drop": drop, "media": media, "replica": writer.name}
            try:
                writer.put(*rows_of(lease, work.prompt, samples, played, texts, **more))
            except Exception as error:  # noqa: BLE001 - what people may read later ends no run
                writer.leave_out(len(samples), error)

    def _kept(self, lease: Lease, generated: Generated) -> str:
        """Keep the media of a held-out sample; returns their place, empty without media or if they are not kept."""
        media_writer = self._parts.media_writer
        if media_writer is None or generated.media is None or lease.purpose != "evaluation":
            return ""
        return media_writer.keep(generated.newest_version, lease.row, generated.media)


@attrs.frozen(kw_only=True, eq=False)
class LeaseRecipe:
    """Recipe and algorithm of one lease, from its beginning to its end."""

    recipe: Recipe
    algorithm: Algorithm


class LeaseRecipes:
    """Recipes and algorithms by the values that leases carry; those of the newest values are kept.

    Called by several threads; whoever comes second makes the same once more. `make` makes the main stage's algorithm.
    """

    def __init__(self, recipe: Recipe, make: Callable[[Recipe], Algorithm]) -> None:
        self._recipe: Final = recipe
        self._make: Final = make
        self._first: Final = LeaseRecipe(recipe=recipe, algorithm=make(recipe))
        self._known: dict[tuple[tuple[str, Scalar], ...], LeaseRecipe] = {}

    def of(self, settings: Mapping[str, Scalar]) -> LeaseRecipe:
        """Recipe and algorithm of a lease with these values.

        Raises:
            ConfigError: The algorithm refuses its options, or the recipe its values.
            PluginError: The algorithm failed.
        """
        if not settings:
            return self._first
        key = tuple(sorted(settings.items()))
        known = self._known.get(key)
        if known is None:
            recipe = recipe_with(self._recipe, settings)
            known = LeaseRecipe(recipe=recipe, algorithm=self._make(recipe))
            self._known = dict([*list(self._known.items())[1 - _KEPT :], (key, known)])
        return known
