"""The view of a run at one moment: derived from its state and events, and shared by all that show it."""
