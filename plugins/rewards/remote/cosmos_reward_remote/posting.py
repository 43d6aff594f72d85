"""JSON there and back over HTTP, to one address."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Collection, Sequence
from typing import Any, Final

import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.errors import ConfigError
from cosmos_core.types import JSON
from cosmos_reward_remote.exchange import Exchange, Patience, address, away, is_in_the_clear


@attrs.frozen(kw_only=True)
class PostingOptions:
    """Options of whatever is asked over HTTP."""

    url: str = option(help="Address, with `http://` or `https://`.")
    key_variable: str | None = option(
        None,
        help="Environment variable of rollout replicas with the key, sent as `Authorization: Bearer`; absent: none.",
    )
    request_timeout_s: float = option(30.0, help="Seconds until a request is given up.", validator=check.gt(0.0))
    retries: int = option(
        3,
        help="Times that a request is repeated after a lost connection, a timeout or a status of 408, 429 or 5xx.",
        validator=check.ge(0),
    )
    backoff_s: float = option(
        0.5, help="Seconds before the first repetition, doubled before each other one.", validator=check.gt(0.0)
    )
    concurrency: int = option(64, help="Most requests of a worker at a time.", validator=check.ge(1))


class Poster:
    """Posts to one address.

    Args:
        name: Of the reward, for messages.
        options: See there.
        url: The address, if it is another one than the options'.
        repeats_timeouts: Whether what was not answered in time is sent again.

    Raises:
        ConfigError: The address is none.
    """

    def __init__(
        self, name: str, options: PostingOptions, url: str | None = None, *, repeats_timeouts: bool = True
    ) -> None:
        self._options: Final = options
        self._url: Final = url or options.url
        self._free: Final = asyncio.Semaphore(options.concurrency)
        patience = Patience(
            request_timeout_s=options.request_timeout_s,
            retries=options.retries,
            backoff_s=options.backoff_s,
            repeats_timeouts=repeats_timeouts,
        )
        self._exchange: Final = Exchange(name, patience)
        if is_in_the_clear(address("url", options.url)) and options.key_variable is not None:
            raise ConfigError(
                f"url: {options.url!r} would send the key of {options.key_variable} in the clear; use https"
            )

    def absent(self) -> str:
        """The variable that the environment lacks, or that nothing answers at the address; empty if all is there."""
        if unset := self._unset():
            return unset
        told = away(address("url", self._url))
        return f"url: {told}" if told else ""

    def _unset(self) -> str:
        unset = self.unset_variables([name for name, value in os.environ.items() if value.strip()])
        return f"key_variable: {unset[0]} is not set in this environment; set it to the key" if unset else ""

    def unset_variables(self, given: Collection[str]) -> Sequence[str]:
        """The variable of the key, unless it is given or there is none."""
        variable = self._options.key_variable
        return () if variable is None or variable in given else (variable,)

    def read_key(self) -> None:
        """Take the key from the environment.

        Raises:
            ConfigError: It is not there.
        """
        if unset := self._unset():
            raise ConfigError(unset)
        if self._options.key_variable is not None:
            self._exchange.bear(os.environ[self._options.key_variable].strip())

    async def post(self, body: JSON) -> Any:
        """Send a request, again if need be, and return the JSON of the answer.

        Raises:
            PluginError: There is no answer, or it is no JSON.
        """
        async with self._free:
            answer = await self._exchange.send("POST", self._url, json=body)
        if answer.status != 200:
            raise self._exchange.error(self._url, f"status {answer.status}: {answer.shown}")
        try:
            return json.loads(answer.data)
        except (ValueError, RecursionError):
            raise self._exchange.error(self._url, f"an answer that is no JSON: {answer.shown}") from None
