"""The kit for engines: `kit` puts it together, the other modules hold one idea each."""
