"""The kit for hooks: `kit` puts it together, the other modules hold one idea each."""
