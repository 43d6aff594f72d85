"""The kept samples of a run as its report and its live page show them: data for `assets/samples.js`, all of it bounded.

Neither pyarrow nor a tokenizer is imported, and nothing is read, before somebody asks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import msgspec

from cosmos_core.config.loading import load_job
from cosmos_core.errors import ConfigError
from cosmos_core.storage.samples import Summary, counts, damaged, none_found, ranked, ratios, samples, summaries

ASSETS: Final = Path(__file__).parent / "assets"
SCRIPT: Final = "samples.js"
STYLE: Final = "samples.css"
COUNT: Final = 50
"""Groups of one answer."""

_NEWEST: Final = 50_000
"""Samples that are looked at."""
_EXCERPT: Final = 160
_TEXT: Final = 20_000
_FACT: Final = 2000
_TOKENS: Final = 8192
_SAMPLES: Final = 256
_EMBEDDED: Final = 12
"""Groups of each order and purpose that a report has at most, and how much of each sample."""
_EMBEDDED_TEXT: Final = 4000
_EMBEDDED_TOKENS: Final = 400
_TOKENIZER: Final = "tokenizer.json"
_SHARED: Final = (
    *("lease", "position", "row", "purpose", "step", "attempt"),
    *("prompt", "prompt_media", "reference", "metadata"),
)
_COLUMNS: Final = (
    *("prompt", "prompt_media", "reference", "metadata", "completion", "media", "reward", "rewards", "detail"),
    *("replica", "time", "oldest_version", "num_units", "num_prompt_units"),
)


class SampleBrowser:
    """The samples of the run in a folder, as data for a page; a ConfigError of any method says why there are none."""

    def __init__(self, directory: Path) -> None:
        self._directory: Final = directory

    def groups(self, *, order: str = "newest", first: int = 0, text: str = "", **wanted: Any) -> dict[str, Any]:
        """Some groups in an order, from the place `first` on, with `text` in prompt or completion; and how many."""
        # An expression of a reader's own could take hours.
        grep = f"(?i){re.escape(text)}" if text else ""
        found = ranked(summaries(self._directory, newest=_NEWEST, grep=grep, **wanted), order)
        shown = found[first : first + COUNT]
        texts = {each["lease"]: each["prompt"] for each in self._of([each.lease for each in shown], ("prompt",))}
        groups = [_summary(each, texts.get(each.lease, "")) for each in shown]
        return {"groups": groups, "total": len(found), "note": self._note(len(found))}

    def group(self, lease: int) -> dict[str, Any]:
        """A prompt with its samples, without their tokens."""
        found, number = list[dict[str, Any]](), 0
        for number, each in enumerate(self._of([lease], _COLUMNS), start=1):
            found += [_short(each, _TEXT)] if number <= _SAMPLES else []
        if not found:
            raise ConfigError(f"the samples of lease {lease} are not kept, or not written yet")
        return _group(found, number)

    def tokens(self, lease: int, index: int) -> dict[str, Any]:
        """The tokens of a sample: `ids`, `pieces` of text (none without a tokenizer), `logprobs` and `ratios`."""
        for each in self._of([lease], ("units", "logprobs"), index=index):
            known = ratios(self._directory, [lease], _TOKENS, _NEWEST)
            return tokens_of(each, self._tokenizer, known.get((lease, index)), _TOKENS)
        raise ConfigError(f"sample {index} of lease {lease} is not kept, or not written yet")

    def given(self, lease: int, number: int) -> str:
        """The place of an image or video that a prompt shows."""
        for each in self._of([lease], ("prompt_media",)):
            if number < len(each["prompt_media"] or ()):
                return str(each["prompt_media"][number])
        raise ConfigError(f"the prompt of lease {lease} has no media {number}")

    def embedded(self, max_bytes: int) -> dict[str, Any]:
        """The newest groups, and those with the highest and lowest mean reward, with all that a page shows of them."""
        found = summaries(self._directory, newest=_NEWEST)
        kinds = [[each for each in found if each.purpose == purpose] for purpose in ("train", "evaluation")]
        orders = [ranked(kind, order)[:_EMBEDDED] for kind in kinds for order in ("newest", "worst", "best")]
        orders.append([each for each in ranked(found, "newest") if each.shows_media][: 2 * _EMBEDDED])
        # One of each in turn, as long as there is room.
        chosen = {each.lease: each for picks in itertools.zip_longest(*orders) for each in picks if each is not None}
        held: dict[int, list[dict[str, Any]]] = {lease: [] for lease in chosen}
        known = ratios(self._directory, [*chosen], _EMBEDDED_TOKENS, _NEWEST)
        for each in self._of([*chosen], ()):
            if len(own := held[each["lease"]]) < _SAMPLES:
                ratios_of = known.get((each["lease"], each["index"]))
                tokens = tokens_of(each, self._tokenizer, ratios_of, _EMBEDDED_TOKENS)
                own.append(_short(each, _EMBEDDED_TEXT) | {"tokens": tokens})
        groups, left_out = list[dict[str, Any]](), 0
        for own in filter(None, held.values()):
            summary = chosen[own[0]["lease"]]
            detail = _group(own, summary.num_samples)
            group = _summary(summary, detail["prompt"]) | {"detail": detail}
            if (size := len(encoded(group))) <= max_bytes:
                max_bytes -= size
                groups.append(group)
            else:
                left_out += 1
        return {"groups": groups, "total": len(found), "note": self._note(len(found), left_out)}

    def _of(self, leases: Sequence[int], columns: Sequence[str], **wanted: Any) -> Iterable[dict[str, Any]]:
        return samples(self._directory, newest=_NEWEST, lease=leases, columns=columns, **wanted) if leases else ()

    def _note(self, number: int, left_out: int = 0) -> str:
        if not number:
            return none_found(self._directory)
        every, newest = (counts(self._directory, bound)["rows"] for bound in (None, _NEWEST))
        words = [f"of the newest {newest:,} of {every:,} samples that are kept"] if every != newest else []
        words += [f"this page has no room for {left_out} of the chosen prompts"] if left_out else []
        return "; ".join(filter(None, (*words, damaged(self._directory))))

    @functools.cached_property
    def _tokenizer(self) -> Any:
        """The run's tokenizer without its model; None where it is not at hand, or cannot be read."""
        job = load_job(self._directory)
        model = job.recipe.model.path or ""
        places = [job.assets / _TOKENIZER, *([Path(model) / _TOKENIZER] if model else [])]
        if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
            from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - where tokens are looked at

            places.append(Path(str(try_to_load_from_cache(model, _TOKENIZER))))
        from tokenizers import Tokenizer  # noqa: PLC0415 - where tokens are looked at

        # What it raises of a file that is damaged, or newer than it, has no class of its own.
        with contextlib.suppress(Exception):
            return Tokenizer.from_file(str(next(place for place in places if place.is_file())))


def encoded(data: object) -> bytes:
    """JSON, also for the inside of a `<script>`, which no text in it can end."""
    return msgspec.json.encode(data).replace(b"<", b"\\u003c")


def _summary(each: Summary, prompt: str) -> dict[str, Any]:
    facts = attrs.asdict(each, filter=attrs.filters.exclude("rewards"))
    return {**facts, "reward": each.reward, "prompt": " ".join(prompt[: 2 * _EXCERPT].split())[:_EXCERPT]}


def _short(sample: Mapping[str, Any], most: int) -> dict[str, Any]:
    rest = {name: value for name, value in sample.items() if name not in ("units", "logprobs")}
    for name in ("reference", "metadata"):
        text = sample[name] if isinstance(sample[name], str) else json.dumps(sample[name], ensure_ascii=False)
        rest[name] = sample[name] if len(text) <= _FACT else _cut(text, _FACT)
    return {**rest, **{name: _cut(sample[name], most) for name in ("prompt", "completion", "detail")}}


def _group(found: list[dict[str, Any]], total: int) -> dict[str, Any]:
    shared = {name: found[0][name] for name in _SHARED}
    shared["prompt_media"] = [place if len(place) < _TEXT else "" for place in shared["prompt_media"] or ()]
    own = [{name: value for name, value in each.items() if name not in _SHARED} for each in found]
    return {**shared, "total": total, "samples": sorted(own, key=lambda each: each["index"])}


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} … {len(text) - most:,} more characters"


def tokens_of(sample: Mapping[str, Any], tokenizer: Any, ratios_n: Sequence[float] | None, most: int) -> dict[str, Any]:
    """The first tokens of a sample, with the ratios of its n decisions, and how many it has."""
    ids, logprobs = ((sample[name] or ())[:most] for name in ("units", "logprobs"))
    rest = iter(ratios_n or ())
    # Decisions are those tokens that have a log-prob.
    values = (logprobs, [None if each is None else next(rest, None) for each in logprobs])
    # JSON has no word for what is no number, which is what one would look for here.
    told = [[each if each is None or math.isfinite(each) else str(each) for each in some] for some in values]
    return {
        "ids": ids,
        "pieces": None if tokenizer is None else _pieces(tokenizer, ids),
        "logprobs": told[0],
        "ratios": ratios_n and told[1],
        "total": len(sample["units"] or ()),
    }


def _pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; empty where a character's later bytes are in the next one."""
    from tokenizers.decoders import DecodeStream  # noqa: PLC0415 - where tokens are looked at

    try:
        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(tokenizer, each) or "" for each in ids]
    except Exception:  # noqa: BLE001 - what it raises where bytes are no text has no class of its own
        return [tokenizer.decode([each], skip_special_tokens=False) for each in ids]
