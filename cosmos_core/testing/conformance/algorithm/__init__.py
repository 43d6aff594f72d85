"""The kit for algorithms: `kit` puts it together, the other modules hold one idea each."""
