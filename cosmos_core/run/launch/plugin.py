"""The entry point `local`: every process on the machine of `cosmos run`."""

from __future__ import annotations

import functools

from cosmos_core.devices import num_threads
from cosmos_core.protocols import Launcher, LauncherCapabilities, LauncherContext, NoOptions, Provider, hookimpl
from cosmos_core.run import fork_server
from cosmos_core.run.launch import forks
from cosmos_core.run.launch.local import LocalLauncher


def _create(_options: NoOptions, context: LauncherContext) -> Launcher:
    threads = num_threads(context.threads)
    begin = functools.partial(forks.start, threads=threads)
    return LocalLauncher(context.logs, begin if fork_server.prepare(threads) else None)


@hookimpl
def cosmos_launcher() -> Provider[Launcher]:
    """Provide the launcher of this machine."""
    return Provider(create=_create, capabilities=LauncherCapabilities(colocates=True))
