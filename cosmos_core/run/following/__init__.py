"""Following a run that goes on: a connection to its controller, and its events folded into a state of our own."""
