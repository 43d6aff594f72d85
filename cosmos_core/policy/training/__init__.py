"""Turns micro-batches into a step: losses, gradients, the update and its metrics."""
