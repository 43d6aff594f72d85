"""Lifecycle hooks of a run: made from its recipe, each called on a thread of its own."""
