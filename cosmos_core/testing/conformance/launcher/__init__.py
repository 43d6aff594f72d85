"""The conformance kit for launchers."""
