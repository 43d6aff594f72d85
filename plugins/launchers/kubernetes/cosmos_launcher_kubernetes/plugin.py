"""The entry point `kubernetes`."""

from __future__ import annotations

from cosmos_core.protocols import Launcher, LauncherCapabilities, Provider, hookimpl
from cosmos_launcher_kubernetes.launcher import KubernetesLauncher
from cosmos_launcher_kubernetes.options import KubernetesOptions


@hookimpl
def cosmos_launcher() -> Provider[Launcher]:
    """Provide the launcher of Kubernetes clusters with JobSet."""
    capabilities = LauncherCapabilities(submits=True, shares_folder=False, colocates=True)
    return Provider(create=KubernetesLauncher, options=KubernetesOptions, capabilities=capabilities)
