"""Reward `service`: another process gives the scores, over HTTP, for a batch of completions at a time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.errors import PluginError
from cosmos_core.plugins.batching import Batcher
from cosmos_core.protocols import Completion, Provider, Reward, RewardCapabilities, RewardContext, Score, hookimpl
from cosmos_reward_remote.posting import Poster, PostingOptions
from cosmos_reward_remote.protocol import request_of, scores_of


@attrs.frozen(kw_only=True)
class ServiceOptions(PostingOptions):
    """Options of `service`."""

    retries: int = option(
        3,
        help="Times that a request is repeated after a lost connection or a status of 408, 429 or 5xx. After a timeout "
        "it is not: the service may still be at it.",
        validator=check.ge(0),
    )
    batch: int = option(16, help="Most completions of a request.", validator=check.ge(1))
    wait_ms: float = option(
        20.0, help="Milliseconds that a completion waits for others of the same request.", validator=check.ge(0.0)
    )


class Service:
    """The service's scores, as they are. What it has no score for is an error of that completion alone."""

    def __init__(self, options: ServiceOptions, context: RewardContext) -> None:
        self._name: Final = context.name
        self._poster: Final = Poster(context.name, options, repeats_timeouts=False)
        self._batcher: Final = Batcher(self._ask, size=options.batch, wait_s=options.wait_ms / 1000.0)

    def absent(self) -> str:
        """The variable of the key if the environment lacks it, or that nothing answers at the address; else empty."""
        return self._poster.absent()

    def unset_variables(self, given: Collection[str]) -> Sequence[str]:
        """The variable of the key, unless it is given or there is none."""
        return self._poster.unset_variables(given)

    def load(self) -> None:
        """Take the key from the environment.

        Raises:
            ConfigError: It is not there.
        """
        self._poster.read_key()

    async def score(self, completion: Completion) -> Score:
        """Ask the service.

        Raises:
            PluginError: It did not answer, or with something else than scores, or with no score for this completion.
        """
        scored = await self._batcher.put(completion)
        if isinstance(scored, str):
            raise PluginError(f"reward {self._name}: the service has no score: {scored:.200}")
        return scored

    async def _ask(self, completions: Sequence[Completion]) -> list[Score | str]:
        answer = await self._poster.post(request_of(completions))
        try:
            return scores_of(answer, len(completions))
        except PluginError as error:
            raise PluginError(f"reward {self._name}: the service's answer cannot be used: {error}") from None


@hookimpl
def cosmos_reward() -> Provider[Reward]:
    """Provide the service."""
    return Provider(create=Service, options=ServiceOptions, capabilities=RewardCapabilities(deterministic=False))
