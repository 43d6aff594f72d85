"""Requests and answers of reward services: in the format of `cosmos reward-service`, or in that of cosmos-rl's.

Both formats are described in docs/reward-service.md.
"""

from __future__ import annotations

import asyncio
import io
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import attrs
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save as safetensors

from cosmos_core.errors import DataError
from cosmos_core.protocols import Completion
from cosmos_core.types import JSON, Array, Payload
from cosmos_reward_remote.access import Access
from cosmos_reward_remote.exchange import Answer, Exchange

_NOT_READY: Final = 400
"""What cosmos-rl's format says of a request that is not ready, or that it has never heard of."""

_NOT_FOUND: Final = 404
_NOT_ALLOWED: Final = 405

_NO_REQUEST: Final = "00000000-0000-0000-0000-000000000000"
"""What no request is called."""

_BINARY: Final = {"Content-Type": "application/octet-stream"}


@attrs.frozen(kw_only=True, eq=False)
class Seen:
    """The part of a completion that is sent.

    Attributes:
        completion: What it is of.
        kind: `media` or `latents`.
        array: uint8 [F, height, width, 3] or float32 [C, T, H, W].
        fps: Frames of a second; of latents what the media have, or None.
    """

    completion: Completion
    kind: str
    array: Array
    fps: float | None


@attrs.frozen(kw_only=True)
class Results:
    """The results of a service for a request.

    Attributes:
        values: Of each scorer, of each completion: a finite number, or why there is none.
        details: Likewise, what the scorer says of it; may be empty.
    """

    values: Mapping[str, Sequence[float | str]]
    details: Mapping[str, Sequence[str]] = attrs.field(factory=dict)


class Wire(Protocol):
    """A format."""

    def body(self, seen: Sequence[Seen], scorers: Sequence[str]) -> bytes:
        """The body of a request."""
        ...

    async def check(self, exchange: Exchange, access: Access, kind: str, scorers: Sequence[str]) -> None:
        """Ask whether the service would take requests, as far as the format has that.

        Raises:
            RefusedError: It would not.
            PluginError: There is no answer.
        """
        ...

    async def enqueue(self, exchange: Exchange, access: Access, body: bytes, key: str) -> Any:
        """Send a request; what its results are asked for by.

        Raises:
            RefusedError: It is refused.
            PluginError: There is no answer, or it cannot be used.
        """
        ...

    async def fetch(self, exchange: Exchange, access: Access, ticket: Any, scorers: Sequence[str]) -> Results:
        """Wait for the results.

        Raises:
            PluginError: There are none, or the answer cannot be used.
        """
        ...


def seen_of(completion: Completion, kind: str, name: str) -> Seen:
    """The part of a completion that is sent.

    Raises:
        DataError: It was not rendered, or its payload has no finished latents.
    """
    media, payload = completion.media, completion.payload
    fps = None if media is None else float(np.frombuffer(media.arrays["fps"].data, "<f4")[0])
    if kind == "media":
        if media is None:
            raise DataError(f"reward {name}: the completion has no frames; use an engine that renders")
        return Seen(completion=completion, kind=kind, array=media.arrays["frames"], fps=fps)
    found = _finished(payload)
    if found is None:
        raise DataError(
            f"reward {name}: the completion has no latents of its end (`sample` of a payload of kind latents); "
            "set send = 'media'"
        )
    return Seen(completion=completion, kind=kind, array=found, fps=fps)


class CosmosWire:
    """The format of `cosmos reward-service`.

    Args:
        wait_s: Seconds that a request for results waits for them.
        poll_s: Least seconds from one such request to the next: a service may answer sooner than it was asked to.
    """

    def __init__(self, wait_s: float, poll_s: float) -> None:
        self._wait_s: Final = wait_s
        self._poll_s: Final = poll_s

    def body(self, seen: Sequence[Seen], scorers: Sequence[str]) -> bytes:
        """One line of JSON, and the arrays as safetensors."""
        line = {
            "version": 1,
            "kind": seen[0].kind,
            "scorers": list(scorers),
            "completions": [_described(each) for each in seen],
        }
        arrays = {str(index): _values(each.array) for index, each in enumerate(seen)}
        return json.dumps(line).encode() + b"\n" + safetensors(arrays)

    async def check(self, exchange: Exchange, access: Access, kind: str, scorers: Sequence[str]) -> None:
        """Ask for the scorers by name, since it refuses what it does not know; and for results that nobody has."""
        asked = [("kind", kind), *(("scorer", name) for name in scorers)]
        url = access.enqueue_url
        answer = await exchange.send("GET", url, params=asked)
        if answer.status == _NOT_ALLOWED:
            raise exchange.error(
                url, f"status {answer.status}: a service of an older release, which tells no scorers; upgrade it"
            )
        _object(exchange, url, answer, 200)
        answer = await exchange.send("GET", access.fetch_url, params={"id": _NO_REQUEST})
        if answer.status != _NOT_FOUND or _NO_REQUEST not in str(_said(answer).get("error")):
            raise exchange.refusal(access.fetch_url, answer)

    async def enqueue(self, exchange: Exchange, access: Access, body: bytes, key: str) -> str:
        """Send a request, under an idempotency key; its id."""
        url = access.enqueue_url
        answer = await exchange.send("POST", url, headers={**_BINARY, "Idempotency-Key": key}, data=body)
        said = _object(exchange, url, answer, 202)
        if not isinstance(said.get("id"), str):
            raise exchange.error(url, f"an answer without an id: {answer.shown}")
        return str(said["id"])

    async def fetch(self, exchange: Exchange, access: Access, ticket: str, scorers: Sequence[str]) -> Results:
        """Wait for the results, a while at a time."""
        url = access.fetch_url
        while True:
            begin = time.monotonic()
            answer = await exchange.send("GET", url, params={"id": ticket, "wait_s": f"{self._wait_s:g}"})
            if answer.status != 202:
                break
            await asyncio.sleep(max(0.0, begin + self._poll_s - time.monotonic()))
        scores = _object(exchange, url, answer, 200).get("scores")
        rows = {name: scores.get(name) if isinstance(scores, Mapping) else None for name in scorers}
        if not all(isinstance(row, list) and all(isinstance(each, Mapping) for each in row) for row in rows.values()):
            raise exchange.error(url, f"an answer without scores of {', '.join(scorers)}: {answer.shown}")
        return Results(
            values={
                name: [_value(each.get("value"), each.get("error")) for each in row or ()] for name, row in rows.items()
            },
            details={name: [str(each.get("detail", "")) for each in row or ()] for name, row in rows.items()},
        )


class CosmosRlWire:
    """The format of cosmos-rl's reward service. Completions of a request have one shape.

    Source: `reward_service` of cosmos-rl 0.4.7 (README.md, its service), and what its trainer sends.

    Args:
        score_keys: Of each scorer, which of the scores it answers with counts; `a+b` is their sum.
        poll_s: Seconds between requests for results.
    """

    def __init__(self, score_keys: Mapping[str, str], poll_s: float) -> None:
        self._score_keys: Final = score_keys
        self._poll_s: Final = poll_s

    def body(self, seen: Sequence[Seen], scorers: Sequence[str]) -> bytes:
        """One line of JSON, and the arrays as npy: images, videos with channels before frames, or latents."""
        first = seen[0]
        values = [_values(each.array) for each in seen]
        line: dict[str, JSON] = {
            "prompts": [_text(each.completion) for each in seen],
            "reward_fn": dict.fromkeys(scorers, 1.0),
        }
        if first.kind == "media" and first.array.shape[0] == 1:
            line["media_type"], array = "image", np.stack([each[0] for each in values])
        elif first.kind == "media":
            line["media_type"], array = "video", np.stack([each.transpose(3, 0, 1, 2) for each in values])
        else:
            line["media_type"], array = "latent", np.stack(values).astype(np.float16)
        if line["media_type"] != "image":
            line["video_infos"] = [{} if each.fps is None else {"video_fps": each.fps} for each in seen]
        file = io.BytesIO()
        np.save(file, np.ascontiguousarray(array), allow_pickle=False)
        return json.dumps(line).encode() + b"\n" + file.getvalue()

    async def check(self, exchange: Exchange, access: Access, kind: str, scorers: Sequence[str]) -> None:  # noqa: ARG002 - it does not tell
        """Ask for results that nobody has: the format asks for no scorers, but it may look at the token."""
        sent = {"uuid": _NO_REQUEST, "type": scorers[0]}
        answer = await exchange.send("POST", access.fetch_url, data=sent)
        # What has no such path may have status 404, too.
        if answer.status != _NOT_READY and not (answer.status == _NOT_FOUND and "message" in _said(answer)):
            raise exchange.refusal(access.fetch_url, answer)

    async def enqueue(self, exchange: Exchange, access: Access, body: bytes, key: str) -> tuple[str, str]:  # noqa: ARG002 - it has no such keys
        """Send a request; its id, and the replica of the service that has it."""
        url = access.enqueue_url
        answer = await exchange.send("POST", url, headers=_BINARY, data=body)
        said = _object(exchange, url, answer, 200)
        if not isinstance(said.get("uuid"), str):
            raise exchange.error(url, f"an answer without a uuid: {answer.shown}")
        return said["uuid"], str(said.get("replica_id") or "")

    async def fetch(
        self, exchange: Exchange, access: Access, ticket: tuple[str, str], scorers: Sequence[str]
    ) -> Results:
        """Ask for the results of each scorer until they are there."""
        return Results(values={name: await self._pull(exchange, access.fetch_url, ticket, name) for name in scorers})

    async def _pull(self, exchange: Exchange, url: str, ticket: tuple[str, str], scorer: str) -> list[float | str]:
        uuid, replica = ticket
        headers = {"X-Lepton-Replica-Target": replica} if replica else {}
        while True:
            answer = await exchange.send("POST", url, headers=headers, data={"uuid": uuid, "type": scorer})
            if answer.status != _NOT_READY:
                break
            await asyncio.sleep(self._poll_s)
        scores = _object(exchange, url, answer, 200).get("scores")
        wanted = self._score_keys.get(scorer, scorer)
        if not isinstance(scores, Mapping):
            raise exchange.error(url, f"an answer without scores: {answer.shown}")
        rows = [scores.get(key) for key in ([wanted] if wanted in scores else wanted.split("+"))]
        if not all(isinstance(row, list) for row in rows):
            known = ", ".join(map(str, scores))
            raise exchange.error(url, f"no scores {wanted!r} of {scorer!r}; there are {known}: set score_keys to one")
        if len({len(row or ()) for row in rows}) > 1:
            raise exchange.error(url, f"scores {wanted!r} of {scorer!r} are of different lengths")
        return [
            _sum([_value(each, None) for each in column]) for column in zip(*(row or () for row in rows), strict=True)
        ]


def _finished(payload: Payload | None) -> Array | None:
    if payload is None or payload.kind != "latents":
        return None
    return payload.arrays.get("sample")


def _values(array: Array) -> npt.NDArray[Any]:
    return np.frombuffer(array.data, array.dtype).reshape(array.shape)


def _described(seen: Seen) -> dict[str, JSON]:
    prompt = seen.completion.prompt
    text: Any = prompt.text if isinstance(prompt.text, str) else prompt.messages
    described: dict[str, JSON] = {"prompt": text, "reference": prompt.reference, "metadata": dict(prompt.metadata)}
    return described | ({} if seen.fps is None else {"fps": seen.fps})


def _text(completion: Completion) -> str:
    text = completion.prompt.text
    return text if isinstance(text, str) else "\n".join(turn.content for turn in text)


def _object(exchange: Exchange, url: str, answer: Answer, status: int) -> Mapping[str, Any]:
    """The JSON object of an answer.

    Raises:
        RefusedError: It has another status.
        PluginError: It has none.
    """
    if answer.status != status:
        raise exchange.refusal(url, answer)
    said = _json(answer)
    if not isinstance(said, Mapping):
        raise exchange.error(url, f"an answer that is no JSON object: {answer.shown}")
    return said


def _said(answer: Answer) -> Mapping[str, Any]:
    """The JSON object of an answer; empty if it has none."""
    said = _json(answer)
    return said if isinstance(said, Mapping) else {}


def _json(answer: Answer) -> Any:
    try:
        return json.loads(answer.data)
    except (ValueError, RecursionError):
        return None


def _value(value: Any, error: Any) -> float | str:
    """A finite number, or why there is none."""
    if isinstance(error, str):
        return error
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        return f"the score is no finite number: {value!r:.100}"
    return float(value)


def _sum(values: Sequence[float | str]) -> float | str:
    wrong = next((each for each in values if isinstance(each, str)), None)
    return wrong if wrong is not None else sum(each for each in values if not isinstance(each, str))
