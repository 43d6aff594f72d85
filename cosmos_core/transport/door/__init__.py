"""Listening for those who may speak, and reaching those who listen so: who connects, as whom, and why not."""

from cosmos_core.transport.door.endpoints import hexadecimal, host_of, parted, shown
from cosmos_core.transport.door.guard import Door, Guarded, listen

__all__ = ["Door", "Guarded", "hexadecimal", "host_of", "listen", "parted", "shown"]
