"""Starts and stops the processes of a run. Building blocks for launcher plugins: `local` and these records."""

from cosmos_core.protocols import Exit, Launcher, ProcessSpec

__all__ = ["Exit", "Launcher", "ProcessSpec"]
