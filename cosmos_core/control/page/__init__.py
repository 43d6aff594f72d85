"""The run's web page: served by the controller's process, on a thread of its own that never touches the state."""
