"""Rows of what a run generated, one a sample, for `storage.parts`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from cosmos_core.rollout.episodes.dialogue import EpisodeResult
from cosmos_core.transport.bounds import sendable
from cosmos_core.transport.directives import Lease
from cosmos_core.types import Payload, Prompt, Sample, SampleStatus

_TEXTS = ("purpose", "prompt", "reference", "metadata", "completion", "media", "status", "detail", "drop", "replica")


def schema() -> Any:
    """The columns, as a `pyarrow.Schema`; docs/samples.md says what they are."""
    import pyarrow as pa  # noqa: PLC0415 - where samples are written

    columns = dict.fromkeys(("lease", "position", "row", "oldest_version", "newest_version"), pa.int64())
    columns |= dict.fromkeys(("index", "num_units", "num_prompt_units"), pa.int32())
    columns |= dict.fromkeys(_TEXTS, pa.string())
    columns |= {"reward": pa.float64(), "rewards": pa.map_(pa.string(), pa.float64()), "truncated": pa.bool_()}
    columns |= {name: pa.list_(pa.int32()) for name in ("units", "documents", "turns")}
    columns |= {"logprobs": pa.list_(pa.float32()), "turn_rewards": pa.list_(pa.float64())}
    return pa.schema({**columns, "prompt_media": pa.list_(pa.string()), "time": pa.float64()})


def rows_of(
    lease: Lease,
    prompt: Prompt,
    samples: Sequence[Sample],
    played: Sequence[EpisodeResult],
    texts: Sequence[str],
    **told: str,
) -> tuple[list[dict[str, Any]], int]:
    """The rows of a group, each with what else is `told`, and about how many bytes they take in memory."""
    shared = {
        **attrs.asdict(lease, recurse=False),
        "prompt": sendable(prompt.words),
        "prompt_media": [sendable(place) for place in prompt.media],
        "reference": _json(prompt.reference),
        "metadata": _json(prompt.metadata),
        "time": time.time(),
        **{name: sendable(text) for name, text in told.items()},
    }
    rows = [
        {
            **shared,
            **attrs.asdict(sample, recurse=False),
            **_tokens(each.generated.payload),
            "rewards": [*sample.rewards.items()],
            "completion": sendable(text),
            "truncated": each.status is SampleStatus.TRUNCATED,
            "detail": sendable(sample.detail),
        }
        for sample, each, text in zip(samples, played, texts, strict=True)
    ]
    length = len(prompt.words) + max(map(len, texts)) + 8 * max(each.num_units for each in samples)
    return rows, (1024 + length) * len(rows)


def _tokens(payload: Payload) -> dict[str, Any]:
    """Token ids and the log-prob of each, None where the model did not generate it; nothing of latents."""
    arrays = payload.arrays
    if payload.kind != "tokens" or "logprobs" not in arrays:
        return {}
    # Copies: what they are part of may be much larger, and is released before they are written.
    units = np.frombuffer(arrays["completion"].data, np.int32).copy()
    logprobs: Any = np.frombuffer(arrays["logprobs"].data, np.float32).copy()
    if "decided" in arrays:
        given = iter(logprobs.tolist())
        logprobs = [next(given) if each else None for each in bytes(arrays["decided"].data)]
    found = {"units": units, "logprobs": logprobs}
    for name in ("documents", "turns", "turn_rewards"):
        if name in arrays:
            found[name] = np.frombuffer(arrays[name].data, arrays[name].dtype).copy()
    return found


def _json(value: Any) -> str:
    """JSON of what a dataset gives, which may hold what JSON has no word for."""
    try:
        return sendable(json.dumps(value, ensure_ascii=False, default=repr))
    except (TypeError, ValueError):
        return sendable(json.dumps(repr(value)))
