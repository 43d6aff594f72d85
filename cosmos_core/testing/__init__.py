"""What tests of cosmos-core and of plugins stand on: the real command line, run in a folder and cleaned up after."""

from cosmos_core.testing.commandline import CommandLine

__all__ = ["CommandLine"]
