"""Verifiable rewards for code. It imports nothing: the confined process has none of its dependencies."""
