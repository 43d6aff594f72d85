"""Bugs at the server loop and in the session: fences, durability, requests, deadlines."""

from __future__ import annotations

from .planting import plant

MACHINE = "cosmos_core.control.machine"
LOG = "cosmos_core.control.write_ahead_log:WriteAheadLog"
SERVER_LOOP = "cosmos_core.control.server_loop:ServerLoop"
FAILURE_DETECTOR = "cosmos_core.control.failure_detector:FailureDetector"
LINES = "cosmos_core.control.connections:Lines"
LINE = "cosmos_core.control.connections:Line"
SESSION = "cosmos_core.replica.session:Session"

PLANTS = (
    plant(
        "reports and beats of any incarnation are taken",
        (f"{LINES}.find", "if replica is None or replica.incarnation != incarnation:", "if replica is None:"),
        (f"{LINES}.find", "line is not None and line.incarnation == incarnation", "line is not None"),
        (f"{MACHINE}.core:_report", "or replica.incarnation != event.incarnation ", ""),
    ),
    plant(
        "who was given up may come back",
        (f"{SERVER_LOOP}._refusal", "if hello.incarnation in self.state.fenced:", "if False:"),
        (f"{MACHINE}.membership:join", "event.incarnation in state.fenced or ", ""),
    ),
    plant(
        "the term is not checked", (f"{SERVER_LOOP}._current_line", "if message.term != self.state.term:", "if False:")
    ),
    plant(
        "a controller that starts keeps the old term",
        (f"{MACHINE}.core:step", "state.term = event.term", "state.term = state.term or event.term"),
    ),
    plant(
        "acknowledged before the commit",
        (f"{SERVER_LOOP}.commit", "self._log.commit()", "now % 1 < 0.5 and self._log.commit()"),
    ),
    plant(
        "who is quiet, or lingers, is told of reports before the commit",
        (f"{SERVER_LOOP}.turn", "settle()  # before the rest", "pass  # before the rest"),
    ),
    plant(
        "a commit that fails is taken for one that did not",
        (
            f"{LOG}.commit",
            "    number = self._journal.commit()",
            "    number = 0\n    try:\n        number = self._journal.commit()\n    except Exception:\n        pass",
        ),
    ),
    plant(
        "reports are not deduplicated",
        (f"{SERVER_LOOP}._on_reports", "skip = replica.received + 1 - message.first", "skip = 0"),
    ),
    plant(
        "a gap in the reports is passed over",
        (f"{SERVER_LOOP}._on_reports", "if skip < 0:\n        return", "skip = max(skip, 0)"),
    ),
    plant(
        "a term may be lost with the end of the journal, and come again",
        ("cosmos_core.control.write_ahead_log:begin_term", "journal.settle()", "journal.commit()"),
    ),
    plant(
        "a controller that has forgotten what it acknowledged is believed",
        (f"{SESSION}._on_welcome", "if welcome.acknowledged < self.outbox.acknowledged:", "if False:"),
    ),
    plant(
        "a pause ends without an entry in the journal",
        (f"{FAILURE_DETECTOR}.look", "self._log.record(RegroupDue())", "setattr(state, 'is_regrouping', False)"),
    ),
    plant(
        "directives are sent once",
        (f"{LINE}.is_overdue", "return self._content is not None and", "return False and"),
    ),
    plant(
        "a request is carried out each time that it comes",
        (f"{SERVER_LOOP}._on_command", "if command.ident not in self.state.commands:", "if True:"),
    ),
    plant(
        "a request to leave is taken in and forgotten",
        (f"{MACHINE}.membership:drain", "state.draining.add(name)", "pass"),
    ),
    plant(
        "a stop before the start is forgotten",
        (f"{MACHINE}.core:_take_command", "state.is_stopping = True", "state.is_stopping = state.has_started"),
    ),
    plant(
        "who is silent is never given up",
        (f"{LINES}.failing", "if quiet_s > control.lost_after_s:", "if False:"),
        (f"{LINES}.failing", "elif quiet_s > _QUIET_BEATS * control.heartbeat_s and", "elif False and"),
    ),
    plant(
        "who hangs is never given up",
        (f"{LINES}.failing", "idle_s > control.progress_timeout_s:", "idle_s > 1e9:"),
    ),
    plant(
        "a launcher's word that a process has ended counts for any process of the name",
        (
            f"{SERVER_LOOP}._on_command",
            "if self.lines.find(request.name, request.incarnation) is not None:",
            "if found := self.state.replicas.get(request.name):",
        ),
        (
            f"{SERVER_LOOP}._on_command",
            "self._log.lose(request.name, request.incarnation, request.reason)",
            "self._log.lose(request.name, found.incarnation, request.reason)",
        ),
    ),
    plant(
        "a session takes directives of any term",
        (
            f"{SESSION}.receive",
            "case Directive() | Acknowledged() if message.term >= max(self._term, 1):",
            "case Directive() | Acknowledged():",
        ),
        (
            f"{SESSION}._on_directive",
            "(directive.term, directive.revision) > (newest.term, newest.revision)",
            "directive.revision > newest.revision or directive.term > newest.term",
        ),
    ),
    plant(
        "a session does not go back to what was not acknowledged",
        (f"{SESSION}.next_message", "self.outbox.go_back()", "pass"),
        (f"{SESSION}._on_welcome", "self.outbox.go_back()", "pass"),
    ),
)
