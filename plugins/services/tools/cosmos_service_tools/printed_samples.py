"""Prints the samples that a run has kept, prompt by prompt or as lines of JSON."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from cosmos_core.config.loading import load_job
from cosmos_core.control.journal import entries
from cosmos_core.control.machine.events import ReplicaLost, Reported
from cosmos_core.errors import ConfigError, CosmosError
from cosmos_core.run.address import find_address
from cosmos_core.run.folder import SUMMARY, is_held
from cosmos_core.run.observer import so_far
from cosmos_core.run.status import look
from cosmos_core.storage.samples import counts, damaged, groups, none_found, samples
from cosmos_core.transport.keys import person_key
from cosmos_core.transport.reports import REPORT, GroupFinished

_SHOWN: Final = 5
"""Prompts that are printed if nobody says how many."""
_CONTROL: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Would steer the terminal."""
_DATA: Final = re.compile(r"(data:[^,\"]{0,100}),[A-Za-z0-9+/=%_-]{40,}")


def print_samples(
    directory: Path, console: Console, *, order: str, count: int | None, as_json: bool, **wanted: Any
) -> None:
    """Print the samples of `count` prompts (None: 5), or as lines of JSON (None: all), and how many are kept.

    A ConfigError if there are none, or as of `samples`.
    """
    found: Iterable[Sequence[Mapping[str, Any]]]
    if as_json and count is None and order == "newest":
        found = ((each,) for each in samples(directory, **wanted))
    else:
        found = groups(directory, order=order, count=count or (sys.maxsize if as_json else _SHOWN), **wanted)
    number = 0
    for number, group in enumerate(found, start=1):  # noqa: B007 - how many there were
        if as_json:
            console.file.writelines(json.dumps(each) + "\n" for each in group)
        else:
            _show(group, console)
    if not number:
        goes_on, state = False, ""
        if not (counts(directory)["rows"] or (directory / SUMMARY).exists()):
            job, state = load_job(directory), f" ({next(look(directory))})"
            goes_on = is_held(directory) or not job.journal.exists() or find_address(job) is not None
        raise ConfigError(f"{directory}: {none_found(directory, goes_on=goes_on)}{state}")
    if not as_json:
        console.print(accounted(directory), highlight=False)


def accounted(directory: Path) -> str:
    """Say how many samples are kept, how many the run's journal counts, evaluations included, and why not all are."""
    kept = counts(directory)
    bad = [words] if (words := damaged(directory)) else []
    try:
        job = load_job(directory)
        address = find_address(job)
        found = so_far(address, job.run_id, person_key(job.keys)) if address is not None else entries(job.journal)
        numbers, may_have_lost = dict[int, int](), address is None
        for _, _, event in found:
            may_have_lost |= isinstance(event, ReplicaLost)
            if isinstance(event, Reported) and isinstance(each := REPORT.decode(event.report), GroupFinished):
                numbers[each.lease] = len(each.samples)
        number = sum(numbers.values())
    except CosmosError as error:
        return "; ".join((f"{kept['rows']:,} samples are kept", *bad, f"how many there were is not known: {error}"))
    why = {"removed": "were removed to make room (samples.keep)", "left_out": "could not be written"}
    told = [f"{kept['rows']:,} samples are kept, and the run's journal counts {number:,}"]
    told += [f"{kept[name]:,} {words}" for name, words in why.items() if kept[name]] + bad
    if (rest := number - kept.total()) > 0:
        causes = ["are not written yet"] + (["are in what cannot be read"] if bad else [])
        if may_have_lost:
            causes.append("were lost with a process that was killed")
        told.append(f"{rest:,} {', or '.join(causes)}")
    return "; ".join(told)


def _show(group: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print the samples of one prompt."""
    first = group[0]
    more = first["drop"] if first["step"] is None else f"step {first['step']}"
    fate = ", ".join(filter(None, (first["fate"], more)))
    place = f"{first['purpose']}: prompt {first['position']}, row {first['row']}, {fate}"
    console.print(Rule(Text(place), align="left"))
    _print(first["prompt"], console, 2)
    for name in ("reference", "prompt_media"):
        if first[name]:
            told = json.dumps(first[name], ensure_ascii=False)
            _print(f"{name}: {_DATA.sub(_shortened, told)}", console, 2)
    for each in group:
        parts = ", ".join(f"{name} {value:g}" for name, value in each["rewards"].items())
        words = [f"#{each['index']}", "no reward" if each["reward"] is None else f"reward {each['reward']:g} ({parts})"]
        words += [f"advantage {each['advantage']:.3g}"] if each["advantage"] is not None else []
        if any(turns := each.get("turn_rewards") or ()):
            words.append(f"of turns {', '.join(f'{value:g}' for value in turns)}")
        words += ["not trained on"] if each["fate"] == "skipped" else []
        words += [each["status"], f"{each['num_units']:,} units after a prompt of {each['num_prompt_units']:,}"]
        versions = dict.fromkeys([each["oldest_version"], each["newest_version"]])
        words += [f"version{'s' if len(versions) > 1 else ''} {' to '.join(map(str, versions))}"]
        _print("  ".join(words), console, 0)
        for text in (each["completion"], each["detail"], each["media"]):
            _print(text, console, 4)


def _shortened(url: re.Match[str]) -> str:
    """The beginning of a `data:` URL, and how much there is of it."""
    return f"{url[1]},… ({len(url[0]):,} characters)"


def _print(text: str, console: Console, indent: int) -> None:
    if text.strip():
        console.print(Padding(Text(text.rstrip().translate(_CONTROL)), (0, 0, 0, indent), expand=False))
