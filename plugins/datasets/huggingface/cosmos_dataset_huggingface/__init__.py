"""Datasets of the Hugging Face Hub, or saved to disk."""

from cosmos_dataset_huggingface.dataset import HuggingFaceDataset
from cosmos_dataset_huggingface.options import HuggingFaceOptions

__all__ = ["HuggingFaceDataset", "HuggingFaceOptions"]
