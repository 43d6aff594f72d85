"""Checkpoints of a policy: how they are written and found, and how they are read into another layout."""
