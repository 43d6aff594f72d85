"""The policy replica: batch to loss to step to published weights, and checkpoints.

`python -m cosmos_core.policy` is its process (`__main__`); `replica` reconciles directives, which `orders` bring.
`processes` form the replica, `mesh` spreads a module over them, `modeling` holds what model plugins build on,
`adapters` lie beside layers; `batches` become steps in `training`, and `checkpoints` keep what is learned.
"""
