"""From samples to a replica's share of a step: micro-batches of even size, within the token budget."""
