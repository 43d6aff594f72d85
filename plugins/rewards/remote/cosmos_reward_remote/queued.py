"""Reward `reward-service`: a reward service looks at what was generated, and gives the scores when it has them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Final, Literal, TypeAlias

import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.errors import ConfigError, PluginError
from cosmos_core.plugins.batching import Batcher
from cosmos_core.protocols import Completion, Provider, Reward, RewardCapabilities, RewardContext, Score, hookimpl
from cosmos_reward_remote.access import Access, access, variables
from cosmos_reward_remote.exchange import Exchange, Patience, RefusedError, address, away
from cosmos_reward_remote.grouping import groups_of
from cosmos_reward_remote.wires import CosmosRlWire, CosmosWire, Results, Seen, Wire, seen_of

_LOG: Final = logging.getLogger(__name__)

_POSITIVE: Final = check.gt(0.0)
_MAY_BE_OF_ONE: Final = frozenset({400, 413})
_CHECK_S: Final = 90.0
"""Most seconds to wait for what a service says before the first score, of the 120 that a worker has to start."""

_CHECK_PAUSE_S: Final = 2.0
_TOLD_S: Final = 5.0
"""Seconds after which people are told that it is waited for."""
_Scored: TypeAlias = Score | str | Exception


@attrs.frozen(kw_only=True)
class QueuedOptions:
    """Options of `reward-service`; where the service is, and its token, are in the environment."""

    scorers: Mapping[str, float] = option(
        help="Scorers of the service, each with its factor in the sum.", validator=check.min_len(1)
    )
    send: Literal["media", "latents"] = option("media", help="What is sent: rendered frames, or the latents.")
    wire: Literal["cosmos", "cosmos-rl"] = option(
        "cosmos", help="Format: of `cosmos reward-service`, or of cosmos-rl's reward service."
    )
    score_keys: Mapping[str, str] = option(
        factory=dict,
        help="With wire = 'cosmos-rl', of each scorer which of its scores counts; absent: that of its own name.",
    )
    allow_http: bool = option(False, help="Whether the token may go to other machines unencrypted.")
    batch: int = option(8, help="Most completions of a request.", validator=check.ge(1))
    batch_mb: int = option(
        256, help="Most megabytes of the arrays of a request; a larger completion goes alone.", validator=check.ge(1)
    )
    wait_ms: float = option(
        50.0, help="Milliseconds that a completion waits for others of the same request.", validator=check.ge(0.0)
    )
    concurrency: int = option(16, help="Most requests of a worker under way.", validator=check.ge(1))
    request_timeout_s: float = option(60.0, help="Seconds until an HTTP request is given up.", validator=_POSITIVE)
    retries: int = option(
        5,
        help="Times that an HTTP request is repeated after a lost connection, a timeout or a status 408, 429 or 5xx; "
        "not counted are 429 and 503 with Retry-After, which are repeated until patience_s.",
        validator=check.ge(0),
    )
    backoff_s: float = option(
        0.5, help="Seconds before the first repetition, doubled before each other one.", validator=_POSITIVE
    )
    poll_s: float = option(0.5, help="Least seconds between requests for results.", validator=_POSITIVE)
    patience_s: float = option(600.0, help="Seconds until a request is given up.", validator=_POSITIVE)


class Queued:
    """The sum of a service's scores. What one of them has no score for is an error of that completion alone."""

    def __init__(self, options: QueuedOptions, context: RewardContext) -> None:
        self._options: Final = options
        self._name: Final = context.name
        unknown = sorted(options.score_keys.keys() - options.scorers.keys())
        if unknown:
            raise ConfigError(f"score_keys: {', '.join(unknown)} is not among scorers, {', '.join(options.scorers)}")
        if options.score_keys and options.wire != "cosmos-rl":
            raise ConfigError("score_keys: only with wire = 'cosmos-rl'; scorers of this format give one score")
        self._wire: Final[Wire] = (
            CosmosRlWire(options.score_keys, options.poll_s)
            if options.wire == "cosmos-rl"
            else CosmosWire(min(30.0, options.request_timeout_s / 2.0), options.poll_s)
        )
        self._patience: Final = Patience(
            request_timeout_s=options.request_timeout_s,
            retries=options.retries,
            backoff_s=options.backoff_s,
            patience_s=options.patience_s,
        )
        self._batcher: Final = Batcher(self._ask, size=options.batch, wait_s=options.wait_ms / 1000.0)
        self._free: Final = asyncio.Semaphore(options.concurrency)
        # Where a run is planned may be another machine than where it runs; what is there must be right.
        self._access: Access | None = access(os.environ, allow_http=options.allow_http)

    def absent(self) -> str:
        """The variables that the environment lacks, or the address at which nothing answers; empty if all is there."""
        known = access(os.environ, allow_http=self._options.allow_http)
        if known is not None:
            name = variables([each for each, value in os.environ.items() if value.strip()])[0]
            told = away(address(name, known.enqueue_url))
            return f"{name}: {told}" if told else ""
        places = ("https://HOST/v1/enqueue", "https://HOST/v1/fetch", "what lets one in")
        named = dict(zip(variables(()), places, strict=True))
        lacking = {name: place for name, place in named.items() if not os.environ.get(name, "").strip()}
        return (
            f"{' and '.join(lacking)}: not set in this environment; set them to where the service is: "
            f"{' and '.join(lacking.values())}"
        )

    def unset_variables(self, given: Collection[str]) -> Sequence[str]:
        """Those of the addresses and the token that are not given."""
        return [name for name in variables(given) if name not in given]

    def load(self) -> None:
        """Take the addresses and the token from the environment, and ask the service whether it would score.

        Raises:
            ConfigError: They are not there, or not right; the service refuses the token, or a scorer.
            PluginError: It does not answer within 90 seconds.
        """
        self._access = access(os.environ, allow_http=self._options.allow_http)
        if self._access is None:
            raise ConfigError(self.absent())
        # A worker's own event loop runs already on the thread that this is called on.
        with concurrent.futures.ThreadPoolExecutor(1, "reward-service") as thread:
            thread.submit(asyncio.run, self._check(self._access)).result()

    async def score(self, completion: Completion) -> Score:
        """Ask the service.

        Raises:
            DataError: There is nothing to send.
            PluginError: The service did not answer, or has no score for this completion.
        """
        scored = await self._batcher.put(seen_of(completion, self._options.send, self._name))
        if isinstance(scored, Exception):
            raise scored
        if isinstance(scored, str):
            raise PluginError(f"reward {self._name}: the service has no score: {scored}")
        return scored

    async def _check(self, known: Access) -> None:
        # A service may be starting while the run is: how often it is asked does not count.
        exchange = Exchange(
            self._name, attrs.evolve(self._patience, retries=None, longest_pause_s=_CHECK_PAUSE_S, patience_s=0.0)
        )
        exchange.bear(known.token)
        asyncio.get_running_loop().call_later(_TOLD_S, _tell, exchange, known.enqueue_url)
        try:
            async with asyncio.timeout(_CHECK_S):
                await self._wire.check(exchange, known, self._options.send, tuple(self._options.scorers))
        except RefusedError as error:
            raise ConfigError(
                f"{error}; the service takes no request as this run would send: check the addresses, the token and "
                "scorers"
            ) from None
        except TimeoutError:
            late = exchange.late(known.enqueue_url, f"no answer within {_CHECK_S:g} s")
            raise PluginError(f"{late}; is the service running, and the address right?") from None

    async def _ask(self, seen: Sequence[Seen]) -> list[_Scored]:
        groups = groups_of(seen, most_bytes=self._options.batch_mb << 20, one_shape=self._options.wire == "cosmos-rl")
        answers = await asyncio.gather(*(self._ask_group([seen[index] for index in each]) for each in groups))
        scored: dict[int, _Scored] = {}
        for indices, answer in zip(groups, answers, strict=True):
            scored.update(zip(indices, answer, strict=True))
        return [scored[index] for index in range(len(seen))]

    async def _ask_group(self, seen: Sequence[Seen]) -> Sequence[_Scored]:
        """The scores of one request; its failure is that of its completions, and of no others."""
        try:
            return await self._request(seen)
        except Exception as error:  # noqa: BLE001 - `score` raises it
            is_of_one = isinstance(error, RefusedError) and error.status in _MAY_BE_OF_ONE
            if len(seen) == 1 or not is_of_one:
                return [error] * len(seen)
        # What is wrong may be wrong with one of them, and all but that one have a score.
        return [each for (each,) in await asyncio.gather(*(self._ask_group([one]) for one in seen))]

    async def _request(self, seen: Sequence[Seen]) -> list[Score | str]:
        assert self._access is not None
        scorers, patience_s = tuple(self._options.scorers), self._options.patience_s
        exchange, ticket = Exchange(self._name, self._patience), None
        exchange.bear(self._access.token)
        try:
            async with self._free, asyncio.timeout(patience_s):
                body = await asyncio.to_thread(self._wire.body, seen, scorers)
                ticket = await self._wire.enqueue(exchange, self._access, body, uuid.uuid4().hex)
                results = await self._wire.fetch(exchange, self._access, ticket, scorers)
        except TimeoutError:
            if ticket is None:
                raise exchange.late(self._access.enqueue_url, f"no answer within {patience_s:g} s") from None
            raise exchange.late(self._access.fetch_url, f"no results within {patience_s:g} s") from None
        wrong = {name: len(row) for name, row in results.values.items() if len(row) != len(seen)}
        if wrong:
            raise exchange.error(self._access.fetch_url, f"scores {wrong} for {len(seen)} completions")
        return [self._sum(results, index) for index in range(len(seen))]

    def _sum(self, results: Results, index: int) -> Score | str:
        total, told = 0.0, {}
        for name, weight in self._options.scorers.items():
            value = results.values[name][index]
            if isinstance(value, str):
                return f"{name}: {value}"
            total += weight * value
            detail = results.details[name][index] if name in results.details else ""
            told[name] = f"{value:.4g}, {detail}" if detail else value
        return Score(value=total, details=told)


def _tell(exchange: Exchange, url: str) -> None:
    """Say what is waited for, if anything is."""
    if exchange.failure:
        what = f"{exchange.failure}; asking again until {_CHECK_S:g} s have passed"
        _LOG.warning("%s", exchange.error(url, what))


@hookimpl
def cosmos_reward() -> Provider[Reward]:
    """Provide the service."""
    capabilities = RewardCapabilities(payload_kinds=frozenset({"media", "latents"}), deterministic=False)
    return Provider(create=Queued, options=QueuedOptions, capabilities=capabilities)
