"""Plugins: discovery from package metadata, selection by name, compatibility, and the manifest of a run."""
