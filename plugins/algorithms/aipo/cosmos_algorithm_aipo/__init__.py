"""Corrections for samples of other weights than those that are trained, or of an engine with other numerics.

One module a preset; the parts are those of `cosmos_algorithm_grpo`.
"""
