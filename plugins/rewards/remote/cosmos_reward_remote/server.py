"""Serves any installed reward to others: `python -m cosmos_reward_remote.server NAME`."""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import hmac
import inspect
import json
import math
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

from aiohttp import web

from cosmos_core.errors import CosmosError
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Completion, Reward, RewardContext, Score
from cosmos_reward_remote.protocol import answer_of, completions_of

_MOST_BYTES: Final = 1 << 26


class Scorer:
    """Scores what it is asked, plain scores one after another on a thread of its own."""

    def __init__(self, reward: Reward) -> None:
        self._reward: Final = reward
        self._thread: Final = concurrent.futures.ThreadPoolExecutor(1)

    async def score(self, completion: Completion) -> Score | str:
        """The score, or why there is none."""
        try:
            outcome: Any = await asyncio.get_running_loop().run_in_executor(self._thread, self._begin, completion)
            if inspect.isawaitable(outcome):
                outcome = await outcome
            scored = outcome if isinstance(outcome, Score) else Score(value=float(outcome))
            return scored if math.isfinite(scored.value) else f"the score is not finite: {scored.value!r}"
        except Exception as error:  # noqa: BLE001 - whatever a reward raises is this completion's answer
            return f"{type(error).__name__}: {error}"

    def _begin(self, completion: Completion) -> Any:
        return self._reward.score(completion)


def application(scorer: Scorer, key: str = "") -> web.Application:
    """An application that answers `POST /score`; with a key, to those who send it."""

    async def answer(request: web.Request) -> web.Response:
        if key and not hmac.compare_digest(request.headers.get("Authorization", "").encode(), f"Bearer {key}".encode()):
            raise web.HTTPUnauthorized(text="the key is missing or another one")
        try:
            completions = completions_of(await request.json())
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from None
        return web.json_response(answer_of(await asyncio.gather(*map(scorer.score, completions))))

    made = web.Application(client_max_size=_MOST_BYTES)
    made.router.add_post("/score", answer)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m cosmos_reward_remote.server", description=__doc__)
    parser.add_argument("name", help="name of the reward plugin")
    parser.add_argument("--options", type=json.loads, default={}, help="its options, as JSON")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at")
    parser.add_argument("--port", type=int, default=8077)
    parser.add_argument("--key-variable", help="environment variable with the key that requests must bring")
    chosen = parser.parse_args(arguments)
    key = os.environ.get(chosen.key_variable, "") if chosen.key_variable else ""
    if chosen.key_variable and not key:
        parser.error(f"{chosen.key_variable} is not set")
    try:
        plugins = PluginSet.load([("reward", chosen.name)])
        context = RewardContext(name=chosen.name, seed=0)
        reward: Reward = plugins.create("reward", chosen.name, chosen.options, context, "--options")
        if hasattr(reward, "load"):
            reward.load()
    except CosmosError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    # What nobody waits for any longer is not scored.
    web.run_app(application(Scorer(reward), key), host=chosen.host, port=chosen.port, handler_cancellation=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
