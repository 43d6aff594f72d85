"""The run as a pure state machine: no I/O, no clock, no randomness.

`core.step` takes an event (`events`) into a `state.State`; `directives.directive_for` derives what a replica shall do.
"""
