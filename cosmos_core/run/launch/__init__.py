"""How a run's processes are started and stopped, and how a run reaches the machines where they are."""

from cosmos_core.protocols import Exit, Launcher, ProcessSpec

__all__ = ["Exit", "Launcher", "ProcessSpec"]
