"""Tells what came of a run: a summary, and a page about it."""
