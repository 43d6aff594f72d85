"""Building blocks for model plugins: the Hugging Face causal language model, packing, packed attention, the head.

`HuggingFaceModel` and `HuggingFaceOptions` are what a family's plugin subclasses.
"""

import cosmos_core.models.lean  # noqa: F401 - before anything of transformers

# isort: split
from cosmos_core.models.attention.documents import Packing
from cosmos_core.models.attention.packed import PACKED
from cosmos_core.models.huggingface import CAPABILITIES, MIXTURE_CAPABILITIES, HuggingFaceModel
from cosmos_core.models.packing import Row, pack
from cosmos_core.models.tokenizer import HuggingFaceOptions
from cosmos_core.models.tokens import tokens_payload, values
from cosmos_core.models.vision.model import VisionLanguageModel

__all__ = [
    "CAPABILITIES",
    "MIXTURE_CAPABILITIES",
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
