"""The entry point `local`: every process on the machine of `cosmos run`."""

from __future__ import annotations

from cosmos_core.protocols import Launcher, LauncherContext, NoOptions, Provider, hookimpl
from cosmos_core.run.launch import nursery
from cosmos_core.run.launch.local import LocalLauncher, visible_gpus


def _create(_options: NoOptions, context: LauncherContext) -> Launcher:
    if visible_gpus():
        return LocalLauncher(context.logs)
    nursery.prepare(context.threads)
    return LocalLauncher(context.logs, nursery.start)


@hookimpl
def cosmos_launcher() -> Provider[Launcher]:
    """Provide the launcher of this machine."""
    return Provider(create=_create)
