"""What engines share: requests, sequences, commands between two steps, weights in place."""
