"""Starts and stops the processes of a run. Building blocks for launcher plugins: `local` and these records."""

from cosmos_core.protocols import Exit, Launcher, ProcessSpec
from cosmos_core.transport.addresses import RACK

__all__ = ["RACK", "Exit", "Launcher", "ProcessSpec"]
