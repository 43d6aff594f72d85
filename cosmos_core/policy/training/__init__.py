"""From micro-batches to a step: losses, gradients, the update, and what is measured of it."""
