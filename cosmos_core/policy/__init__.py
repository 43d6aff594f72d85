"""The policy replica: batch to loss to step to published weights, and checkpoints.

`python -m cosmos_core.policy` is its process (`__main__`); `replica` reconciles directives, `step` runs one step,
`trainer` applies it. `modeling` holds what model plugins build on.
"""
