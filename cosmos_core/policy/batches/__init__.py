"""Turns the samples of a step into each replica's share of it."""
