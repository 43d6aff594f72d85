"""The kept samples of a run as its report and its live page show them: data for `assets/samples.js`, all of it bounded.

Neither pyarrow nor a tokenizer is imported, and nothing is read, before somebody asks.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import msgspec

from cosmos_core.config.loading import load_job
from cosmos_core.errors import ConfigError
from cosmos_core.storage.samples import Summary, counts, none_found, ranked, ratios, samples, summaries

ASSETS: Final = Path(__file__).parent / "assets"
SCRIPT: Final = "samples.js"
STYLE: Final = "samples.css"
COUNT: Final = 50
"""Groups of one answer."""

_NEWEST: Final = 50_000
"""Samples that are looked at."""
_EXCERPT: Final = 160
_TEXT: Final = 20_000
_TOKENS: Final = 8192
_SAMPLES: Final = 256
_EMBEDDED: Final = 12
"""Groups of each order and purpose that a report has at most, and how much of each sample."""
_EMBEDDED_TEXT: Final = 4000
_EMBEDDED_TOKENS: Final = 400
_FACTS: Final = (
    *("index", "reward", "rewards", "advantage", "status", "fate", "drop", "detail", "media", "replica", "time"),
    *("oldest_version", "newest_version", "num_units", "num_prompt_units"),
)
_SHARED: Final = ("lease", "position", "row", "purpose", "step", "attempt", "reference")
_COLUMNS: Final = (
    *("prompt", "prompt_media", "reference", "metadata", "completion", "media", "reward", "rewards", "detail"),
    *("replica", "time", "oldest_version", "num_units", "num_prompt_units"),
)


class SampleBrowser:
    """The samples of the run in a folder, as data for a page; a ConfigError of any method says why there are none."""

    def __init__(self, directory: Path) -> None:
        self._directory: Final = directory
        self._tokens: Tokens | None = None

    def groups(self, *, order: str = "newest", first: int = 0, text: str = "", **wanted: Any) -> dict[str, Any]:
        """Some groups in an order, from the place `first` on, with `text` in prompt or completion; and how many."""
        # An expression of a reader's own could take hours.
        grep = f"(?i){re.escape(text)}" if text else ""
        found = ranked(summaries(self._directory, newest=_NEWEST, grep=grep, **wanted), order)
        shown = found[first : first + COUNT]
        leases = [each.lease for each in shown]
        texts = {each["lease"]: each["prompt"] for each in self._of(leases, ("prompt",))}
        groups = [_summary(each, texts.get(each.lease, "")) for each in shown]
        return {"groups": groups, "total": len(found), "note": self._note(len(found))}

    def group(self, lease: int) -> dict[str, Any]:
        """A prompt with its samples, without their tokens."""
        found = sorted(itertools.islice(self._of([lease], _COLUMNS), _SAMPLES), key=lambda each: each["index"])
        if not found:
            raise ConfigError(f"the samples of lease {lease} are not kept any more")
        return _group(found, _TEXT)

    def tokens(self, lease: int, index: int) -> dict[str, Any]:
        """The tokens of a sample: `ids`, `pieces` of text (none without a tokenizer), `logprobs` and `ratios`."""
        for each in self._of([lease], ("units", "logprobs"), index=index):
            known = ratios(self._directory, [lease], _TOKENS, _NEWEST)
            return self._decoder().of(each, known.get((lease, index)), _TOKENS)
        raise ConfigError(f"sample {index} of lease {lease} is not kept any more")

    def given(self, lease: int, number: int) -> str:
        """The place of an image or video that a prompt shows."""
        places = next((each["prompt_media"] or () for each in self._of([lease], ("prompt_media",))), ())
        if number >= len(places):
            raise ConfigError(f"the prompt of lease {lease} has no media {number}")
        place: str = places[number]
        return place

    def embedded(self, max_bytes: int) -> dict[str, Any]:
        """The newest groups, and those with the highest and lowest mean reward, with all that a page shows of them."""
        found = summaries(self._directory, newest=_NEWEST)
        kinds = [[each for each in found if each.purpose == purpose] for purpose in ("train", "evaluation")]
        orders = [ranked(kind, order)[:_EMBEDDED] for kind in kinds for order in ("newest", "worst", "best")]
        orders.append([each for each in ranked(found, "newest") if each.shows_media][: 2 * _EMBEDDED])
        # One of each in turn, as long as there is room.
        wanted = [each for picks in itertools.zip_longest(*orders) for each in picks if each is not None]
        chosen = {each.lease: each for each in wanted}
        held: dict[int, list[dict[str, Any]]] = {lease: [] for lease in chosen}
        known = ratios(self._directory, [*chosen], _EMBEDDED_TOKENS, _NEWEST)
        for each in self._of([*chosen], ()):
            if len(held[each["lease"]]) < _SAMPLES:
                tokens = self._decoder().of(each, known.get((each["lease"], each["index"])), _EMBEDDED_TOKENS)
                short = {name: value for name, value in each.items() if name not in ("units", "logprobs")}
                held[each["lease"]].append({**short, "tokens": tokens})
        groups = []
        for lease, own in held.items():
            if own:
                detail = _group(sorted(own, key=lambda each: each["index"]), _EMBEDDED_TEXT)
                group = _summary(chosen[lease], detail["prompt"]) | {"detail": detail}
                max_bytes -= len(encoded(group))
                groups += [group] if max_bytes > 0 else []
        return {"groups": groups, "total": len(found), "note": self._note(len(found))}

    def _of(self, leases: Sequence[int], columns: Sequence[str], **wanted: Any) -> Iterable[dict[str, Any]]:
        return samples(self._directory, newest=_NEWEST, lease=leases, columns=columns, **wanted) if leases else ()

    def _note(self, number: int) -> str:
        if not number:
            return none_found(self._directory)
        every, newest = (counts(self._directory, bound)["rows"] for bound in (None, _NEWEST))
        return "" if every == newest else f"of the newest {newest:,} of {every:,} samples that are kept"

    def _decoder(self) -> Tokens:
        if self._tokens is None:
            self._tokens = Tokens(_tokenizer_file(self._directory))
        return self._tokens


def encoded(data: object) -> bytes:
    """JSON, also for the inside of a `<script>`, which no text in it can end."""
    return msgspec.json.encode(data).replace(b"<", b"\\u003c")


def _summary(each: Summary, prompt: str) -> dict[str, Any]:
    facts = attrs.asdict(each, filter=attrs.filters.exclude("rewards"))
    return {**facts, "reward": each.reward, "prompt": " ".join(prompt[: 2 * _EXCERPT].split())[:_EXCERPT]}


def _group(found: Sequence[Mapping[str, Any]], most: int) -> dict[str, Any]:
    first = found[0]
    media = [place if len(place) < _TEXT else "" for place in first["prompt_media"] or ()]
    return {
        **{name: first[name] for name in _SHARED},
        "prompt": _cut(first["prompt"], most),
        "prompt_media": media,
        "metadata": first["metadata"],
        "samples": [
            {name: each[name] for name in (*_FACTS, "tokens") if name in each}
            | {"completion": _cut(each["completion"], most)}
            for each in found
        ],
    }


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} … {len(text) - most:,} more characters"


class Tokens:
    """Texts of tokens by the `tokenizer.json` of a model, without the model; None: their ids alone are known."""

    def __init__(self, path: Path | None) -> None:
        self._tokenizer: Any = None
        if path is not None:
            from tokenizers import Tokenizer  # noqa: PLC0415 - where tokens are looked at

            # What it raises of a file that is damaged, or newer than it, has no class of its own.
            with contextlib.suppress(Exception):
                self._tokenizer = Tokenizer.from_file(str(path))

    def of(self, sample: Mapping[str, Any], known: Sequence[float] | None, most: int) -> dict[str, Any]:
        """The first tokens of a sample, with the ratios that are `known` of its decisions; and how many it has."""
        ids, logprobs = ((sample[name] or ())[:most] for name in ("units", "logprobs"))
        rest = iter(known or ())
        return {
            # Decisions are those tokens that have a log-prob.
            "ratios": known and [None if each is None else next(rest, None) for each in logprobs],
            "ids": ids,
            "pieces": None if self._tokenizer is None else self._pieces(ids),
            # JSON has no word for a log-prob that is no number, which is what one would look for here.
            "logprobs": [value if value is None or math.isfinite(value) else str(value) for value in logprobs],
            "total": len(sample["units"] or ()),
        }

    def _pieces(self, ids: Sequence[int]) -> list[str]:
        """The text that each token adds; empty where a character's later bytes are in the next one."""
        from tokenizers.decoders import DecodeStream  # noqa: PLC0415 - see above

        try:
            stream = DecodeStream(skip_special_tokens=False)
            return [stream.step(self._tokenizer, each) or "" for each in ids]
        except Exception:  # noqa: BLE001 - what it raises where bytes are no text has no class of its own
            return [self._tokenizer.decode([each], skip_special_tokens=False) for each in ids]


def _tokenizer_file(directory: Path) -> Path | None:
    """The tokenizer that was made for a run, or its model's if that is in a folder or in the cache of the hub."""
    job = load_job(directory)
    model = job.recipe.model.path
    places = [job.assets, *([Path(model)] if model else [])]
    found = next((path for place in places if (path := place / "tokenizer.json").is_file()), None)
    if found is None and model is not None and re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - see above

        cached = try_to_load_from_cache(model, "tokenizer.json")
        found = Path(cached) if isinstance(cached, str) else None
    return found
