"""Audits a run's journal, its controller's or the one in its folder."""

from __future__ import annotations

from pathlib import Path

from cosmos_core.config.loading import load_job
from cosmos_core.control.audit import Audit, Auditor, audit
from cosmos_core.control.journal import entries
from cosmos_core.control.recovery_snapshots import require_known
from cosmos_core.run.address import find_address
from cosmos_core.run.observer import so_far
from cosmos_core.transport.keys import person_key


def audit_run(directory: Path) -> Audit:
    """Audit the journal of a run, as far as it has come."""
    job = load_job(directory)
    address = find_address(job)
    if address is not None:
        return audit(so_far(address, job.run_id, person_key(job.keys)))
    if not job.journal.exists():
        require_known(job.recovery_snapshots, None)
    auditor = Auditor()
    for entry in entries(job.journal):
        auditor.take(*entry)
    require_known(job.recovery_snapshots, auditor.state)
    return auditor.result()
