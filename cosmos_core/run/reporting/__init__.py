"""What came of a run: figures, and one page about it."""
