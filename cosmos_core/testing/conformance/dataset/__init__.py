"""The kit for datasets: `kit` puts it together, the other modules hold one idea each."""
