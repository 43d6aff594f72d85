"""`cosmos plugins`. What needs more than the command line itself is imported by the commands: `--help` stays quick."""

from cosmos_core.cli.plugins.app import app

__all__ = ["app"]
