"""Supervising processes: who they are, whether they have ended, and whether others take their place."""
