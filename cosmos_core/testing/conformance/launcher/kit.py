"""The kit for launchers."""

from __future__ import annotations

from cosmos_core.testing.conformance.launcher.submitting import LauncherSubmissions


class LauncherConformance(LauncherSubmissions):
    """What every launcher must satisfy: it starts what it is told, tells each end, and leaves nothing behind.

    Set `plugin`, and what else the defaults do not do for. Where `check()` says that no process can be started from
    here, tests that start some are skipped: run them in such a place too, by a test class whose fixtures make one.

    Attributes:
        timeout_s: Seconds within which a process begins, and its end is told.
        grace_s: Seconds that `stop` is given.

    Fixtures to override: `options`, the options to test with; `context`, the run, for which processes are started in
    `tmp_path`.
    """
