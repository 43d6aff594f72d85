"""Low-rank adapters, whatever the model: the matrices beside its layers, and the weights that lie below."""
