"""The audit of a journal: what became of every prompt, and what each step was trained on.

The state machine says what happened; the books here are kept apart from it, from the events and the moves of single
prompts, so that a mistake in its accounting is found. It takes one entry after another and works in a simulation, too.
"""

from cosmos_core.control.audit.auditor import Auditor, audit
from cosmos_core.control.audit.found import Audit, Batch, StageAudit

__all__ = ["Audit", "Auditor", "Batch", "StageAudit", "audit"]
