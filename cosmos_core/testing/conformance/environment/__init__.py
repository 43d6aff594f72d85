"""The kit for environments: `kit` puts it together, the other modules hold one idea each."""
