"""Runs from Python: what `cosmos_core.train`, `plan` and `open` are, for scripts and notebooks."""
