"""Reads the samples that a run has kept (`storage.samples`), and accounts for them by its journal."""

from __future__ import annotations

from pathlib import Path

from cosmos_core.config.loading import load_job
from cosmos_core.control.journal import entries
from cosmos_core.control.machine.events import Reported
from cosmos_core.errors import CosmosError
from cosmos_core.run.address import find_address
from cosmos_core.run.observer import so_far
from cosmos_core.storage.samples import counts, groups, none_found, samples
from cosmos_core.transport.keys import person_key
from cosmos_core.transport.reports import REPORT, GroupFinished

__all__ = ["accounted", "groups", "none_found", "samples"]


def accounted(directory: Path) -> str:
    """Say how many samples are kept, how many the run's journal counts, evaluations included, and why not all are."""
    kept = counts(directory)
    try:
        job = load_job(directory)
        address = find_address(job)
        found = so_far(address, job.run_id, person_key(job.keys)) if address is not None else entries(job.journal)
        reports = (REPORT.decode(event.report) for _, _, event in found if isinstance(event, Reported))
        number = sum({each.lease: len(each.samples) for each in reports if isinstance(each, GroupFinished)}.values())
    except CosmosError as error:
        return f"{kept['rows']:,} samples are kept; how many there were is not known: {error}"
    words = {"removed": "were removed to make room (samples.keep)", "left_out": "could not be written"}
    told = [f"{kept['rows']:,} samples are kept, and the run's journal counts {number:,}"]
    told += [f"{kept[name]:,} {why}" for name, why in words.items() if kept[name]]
    rest = number - kept.total()
    told += [f"{rest:,} are not written yet, or were lost with a process that was killed"] if rest > 0 else []
    return "; ".join(told)
