"""Bugs that are planted in the controller and the sessions, one at a time: the oracles must find them.

Each is an edit of the source of a function; one that no longer fits is an error, so that none is forgotten.
"""

from __future__ import annotations
import __future__

import contextlib
import importlib
import inspect
import textwrap
from collections.abc import Iterator

import attrs

MACHINE = "cosmos_core.controller.machine"
DESK = "cosmos_core.controller.desk:Desk"
LINES = "cosmos_core.controller.lines"
SESSION = "cosmos_core.replica.session:Session"


@attrs.frozen
class Edit:
    """Of a function, `module:name` or `module:class.name`."""

    function: str
    before: str
    after: str


@attrs.frozen
class Plant:
    """A bug."""

    name: str
    edits: tuple[Edit, ...]


@contextlib.contextmanager
def planted(plant: Plant) -> Iterator[None]:
    """Have a bug in the program for a while."""
    with contextlib.ExitStack() as stack:
        for function in dict.fromkeys(edit.function for edit in plant.edits):
            stack.enter_context(_edited(function, [edit for edit in plant.edits if edit.function == function]))
        yield


@contextlib.contextmanager
def _edited(function: str, edits: list[Edit]) -> Iterator[None]:
    path, _, name = function.partition(":")
    module = importlib.import_module(path)
    owner_name, _, function_name = name.rpartition(".")
    owner = getattr(module, owner_name) if owner_name else module
    original = getattr(owner, function_name)
    source = textwrap.dedent(inspect.getsource(original))
    for edit in edits:
        assert edit.before in source, f"{function} has no {edit.before!r} any more; plant it elsewhere"
        source = source.replace(edit.before, edit.after)
    found: dict[str, object] = {}
    exec(compile(source, function, "exec", __future__.annotations.compiler_flag), module.__dict__, found)
    setattr(owner, function_name, found[function_name])
    try:
        yield
    finally:
        setattr(owner, function_name, original)


PLANTS = (
    Plant(
        "reports and beats of any incarnation are taken",
        (
            Edit(
                f"{LINES}:Lines.find",
                "if replica is None or replica.incarnation != incarnation:",
                "if replica is None:",
            ),
            Edit(f"{LINES}:Lines.find", "line is not None and line.incarnation == incarnation", "line is not None"),
            Edit(f"{MACHINE}.core:_report", "or replica.incarnation != event.incarnation ", ""),
        ),
    ),
    Plant(
        "who was given up may come back",
        (
            Edit(f"{DESK}._refusal", "if hello.incarnation in self.state.fenced:", "if False:"),
            Edit(f"{MACHINE}.membership:join", "event.incarnation in state.fenced or ", ""),
        ),
    ),
    Plant(
        "the term is not checked",
        (Edit(f"{DESK}._current_line", "if message.term != self.state.term:", "if False:"),),
    ),
    Plant(
        "acknowledged before the commit",
        (Edit(f"{DESK}.commit", "self._journal.commit()", "now % 1 < 0.5 and self._journal.commit()"),),
    ),
    Plant(
        "who is quiet, or lingers, is told of reports before the commit",
        (Edit(f"{DESK}.turn", "settle()  # before the rest", "pass  # before the rest"),),
    ),
    Plant(
        "a commit that fails is taken for one that did not",
        (
            Edit(
                f"{DESK}.commit",
                "    self._journal.commit()",
                "    try:\n        self._journal.commit()\n    except Exception:\n        pass",
            ),
        ),
    ),
    Plant(
        "reports are not deduplicated",
        (Edit(f"{DESK}._on_reports", "skip = replica.received + 1 - message.first", "skip = 0"),),
    ),
    Plant(
        "a gap in the reports is passed over",
        (Edit(f"{DESK}._on_reports", "if skip < 0:\n        return", "skip = max(skip, 0)"),),
    ),
    Plant(
        "an old generation counts as the present one",
        (
            Edit(
                f"{MACHINE}.membership:on_formed",
                "if generation is None or generation.order.generation != report.generation:",
                "if generation is None:",
            ),
        ),
    ),
    Plant(
        "a report of any lease settles some lease",
        (
            Edit(
                f"{MACHINE}.core:_settle_lease",
                "replica.leases.pop(report.lease, None)",
                "replica.leases.pop(report.lease, None) or next(iter(replica.leases.values()), None)",
            ),
        ),
    ),
    Plant(
        "a batch is consumed and stays claimed",
        (Edit(f"{MACHINE}.ledger:Ledger.consume", "self.claimed.pop(position)", "self.claimed[position]"),),
    ),
    Plant(
        "prompts of a lost replica are not queued again",
        (Edit(f"{MACHINE}.dispatch:lost_with", "ledger.requeue(lease.position)", "pass"),),
    ),
    Plant(
        "the bound on staleness is one too large",
        (Edit(f"{MACHINE}.claim:is_stale", "> state.settings.max_staleness", "> state.settings.max_staleness + 1"),),
    ),
    Plant(
        "the digest of loaded weights is not checked",
        (Edit(f"{MACHINE}.publication:on_loaded", "if known.digest != report.digest:", "if False:"),),
    ),
    Plant(
        "a pause ends without an entry in the journal",
        (Edit(f"{DESK}.tick", "self._record(RegroupDue())", "setattr(state, 'is_regrouping', False)"),),
    ),
    Plant(
        "directives are sent once",
        (Edit(f"{LINES}:Line.is_overdue", "return self._content is not None and", "return False and"),),
    ),
    Plant(
        "a request is carried out each time that it comes",
        (Edit(f"{DESK}._on_command", "if command.ident not in self.state.commands:", "if True:"),),
    ),
    Plant(
        "a session takes directives of any term",
        (
            Edit(f"{SESSION}.receive", "case Directive() if message.term >= max(self._term, 1):", "case Directive():"),
            Edit(
                f"{SESSION}._on_directive",
                "(directive.term, directive.revision) > (newest.term, newest.revision)",
                "directive.revision > newest.revision or directive.term > newest.term",
            ),
        ),
    ),
    Plant(
        "a session does not go back to what was not acknowledged",
        (
            Edit(f"{SESSION}.next_message", "self.outbox.rewind()", "pass"),
            Edit(f"{SESSION}._on_welcome", "self.outbox.rewind()", "pass"),
        ),
    ),
)
"""Those that are found."""

RARE = (
    Plant(
        "any attempt at a step counts",
        (
            Edit(
                f"{MACHINE}.progress:on_step_done",
                "(report.step, report.attempt, report.generation) != (order.step, order.attempt, running.generation)",
                "report.step > order.step",
            ),
        ),
    ),
    Plant(
        "a step that failed for missing payloads is repeated with the same batch",
        (
            Edit(
                f"{MACHINE}.claim:on_step_failed",
                "for group in [group for group in state.ledger.finished.values() if group.lease in missing]:",
                "for group in []:",
            ),
        ),
    ),
)
"""Not found in a hundred seeds: no replica here repeats an old step as news, for one."""

HIDDEN = Plant(
    "the machine alone does not look at the sequence",
    (Edit(f"{MACHINE}.core:_report", " or event.sequence != replica.received + 1:", ":"),),
)
"""Not found, nor to be: the desk in front of the machine lets no other sequence through; both had to be wrong."""
