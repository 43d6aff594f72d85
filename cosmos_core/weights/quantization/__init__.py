"""Weight matrices in few bits: made by whoever has the weights, sent as codes and scales, read by whoever generates.

The formats are those of `cosmos_core.protocols.quantization`.
"""

from cosmos_core.weights.quantization.codec import (
    copy_exactly,
    dequantise,
    dequantised_rows,
    quantise,
    quantise_tensors,
)
from cosmos_core.weights.quantization.shares import MatrixShare, matrix_shares

__all__ = [
    "MatrixShare",
    "copy_exactly",
    "dequantise",
    "dequantised_rows",
    "matrix_shares",
    "quantise",
    "quantise_tensors",
]
