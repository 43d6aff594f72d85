"""Building blocks for model plugins: the Hugging Face causal language model, packing, packed attention, the head.

`HuggingFaceModel` and `HuggingFaceOptions` are what a family's plugin subclasses.
"""

import cosmos_core.policy.modeling.lean  # noqa: F401 - before anything of transformers

# isort: split
from cosmos_core.policy.modeling.attention.packed import PACKED, Packing
from cosmos_core.policy.modeling.divergence import DIVERGENCES
from cosmos_core.policy.modeling.encoding import HuggingFaceOptions
from cosmos_core.policy.modeling.huggingface import HuggingFaceModel
from cosmos_core.policy.modeling.packing import pack
from cosmos_core.policy.modeling.row import Row
from cosmos_core.policy.modeling.tokens import tokens_payload, values
from cosmos_core.policy.modeling.vision import VisionLanguageModel

__all__ = [
    "DIVERGENCES",
    "PACKED",
    "HuggingFaceModel",
    "HuggingFaceOptions",
    "Packing",
    "Row",
    "VisionLanguageModel",
    "pack",
    "tokens_payload",
    "values",
]
