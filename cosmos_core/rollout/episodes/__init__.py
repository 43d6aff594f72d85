"""Dialogues with environments, which run in worker processes that may hang or die."""
