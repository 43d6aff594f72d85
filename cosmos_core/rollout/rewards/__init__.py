"""Completions get their rewards: scored in worker processes that may hang or die."""
