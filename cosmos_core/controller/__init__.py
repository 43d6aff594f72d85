"""The controller: a pure state machine, its journal, and the server around them. It imports no torch.

`core.fold` and `core.step` take events (`events`) into a `state.State`; `directives.directive_for` derives what a
replica shall do; `journal.replay` reads a finished run's journal.
"""
