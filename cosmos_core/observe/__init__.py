"""Logging, live progress and trackers; nothing here decides anything."""
