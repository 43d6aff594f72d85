"""The agent `command`: any program, in a process of its own for each task."""
