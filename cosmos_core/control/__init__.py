"""The controller: a pure state machine (`machine`), its journal, and the server around them. It imports no torch.

`journal.replay` reads a finished run's journal.
"""
