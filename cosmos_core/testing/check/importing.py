"""What importing a plugin costs and does: every process of a run that needs it pays, and so does `cosmos plan`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from cosmos_core.errors import PluginError
from cosmos_core.plugins.discovery import PluginRecord
from cosmos_core.testing.check.asking import ask_import
from cosmos_core.testing.check.probe import Import
from cosmos_core.testing.check.verdict import Check, Finding, faults

BOUND_S: Final = 1.0
_TRIES: Final = 3


def check_import(record: PluginRecord, environment: Mapping[str, str]) -> Check:
    """Import a plugin in fresh processes: the fastest of three counts, and one that is within the bound will do.

    The check has a summary if the plugin could be imported.
    """
    name = f"{record.kind} {record.name}, import"
    try:
        fastest = ask_import(record, environment)
        for _ in range(_TRIES - 1):
            if fastest.error or fastest.seconds <= BOUND_S:
                break
            fastest = min(fastest, ask_import(record, environment), key=lambda each: each.seconds)
    except PluginError as error:
        return Check(name, "", (Finding("fault", str(error)),))
    if fastest.error:
        return Check(name, "", (Finding("fault", f"{record.module} cannot be imported: {fastest.error}"),))
    return Check(name, f"{fastest.seconds:.2f} s", faults(_problems(record, fastest)))


def _problems(record: PluginRecord, done: Import) -> Iterator[str]:
    if done.seconds > BOUND_S:
        yield (
            f"{record.module} takes {done.seconds:.1f} s to import, allowed is {BOUND_S:.0f} s; "
            "import what is slow in the function that needs it"
        )
    if done.heavy and record.kind not in ("model", "engine"):
        yield f"{record.module} imports {', '.join(done.heavy)}; import it in the function that needs it"
    if done.threads:
        yield f"importing {record.module} starts threads ({', '.join(done.threads)}); start them when it is used"
    if done.processes:
        yield f"importing {record.module} starts processes ({', '.join(done.processes)}); start them when it is used"
    if done.printed:
        yield f"importing {record.module} prints {done.printed.splitlines()[0]!r}; print nothing, or use logging"
