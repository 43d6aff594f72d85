"""The entry point `slurm`."""

from __future__ import annotations

from cosmos_core.protocols import Launcher, LauncherCapabilities, Provider, hookimpl
from cosmos_launcher_slurm.launcher import SlurmLauncher
from cosmos_launcher_slurm.options import SlurmOptions


@hookimpl
def cosmos_launcher() -> Provider[Launcher]:
    """Provide the launcher of Slurm clusters."""
    capabilities = LauncherCapabilities(submits=True, colocates=True)
    return Provider(create=SlurmLauncher, options=SlurmOptions, capabilities=capabilities)
