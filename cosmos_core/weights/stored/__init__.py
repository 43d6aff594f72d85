"""Versions of the weights in a directory or bucket: policy processes write their parts, receivers read ranges."""
