"""The kit for models: `kit` puts it together, the other modules hold one idea each."""
