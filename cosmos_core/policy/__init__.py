"""The policy replica: batch to loss to step to published weights, and checkpoints.

`python -m cosmos_core.policy` is its process (`__main__`); `replica` carries out directives, which `orders` bring.
`processes` form the replica, `mesh` arranges them; `batches` become steps in `training`, and `checkpoints` keep the
state.
"""
