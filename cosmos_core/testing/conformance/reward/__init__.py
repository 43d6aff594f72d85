"""The kit for rewards: `kit` puts it together, the other modules hold one idea each."""
