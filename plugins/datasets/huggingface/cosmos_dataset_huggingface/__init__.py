"""Datasets of the Hugging Face Hub, or saved to disk."""

from cosmos_dataset_huggingface.options import HuggingFaceOptions
from cosmos_dataset_huggingface.plugin import HuggingFaceDataset

__all__ = ["HuggingFaceDataset", "HuggingFaceOptions"]
