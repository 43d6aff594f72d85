"""Building blocks of rollout engines: requests, sequences, commands between two steps, weights in place."""
